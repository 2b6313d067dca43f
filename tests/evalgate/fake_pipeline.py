"""A pipeline that measures nothing: the contract of evalgate.measure.run with a table made by sample_run."""

import types
from collections.abc import Callable
from typing import Any

from evalgate.measure.page import PAGE
from evalgate.measure.run import RunRequest
from evalgate.store.runs import Run, write_run
from tests.evalgate.sample_run import source, summary, token_table


def measured(
    request: RunRequest,
    *,
    observer: Any = None,
    judge: Any = None,
    text_check: Any = None,
    page: bool = True,
    documents: int = 4,
) -> Run:
    """Write a fabricated run to the request's folder; a few bytes stand for its page, which takes longer to make."""
    if text_check is not None:
        text_check("domain", {"prose", "code"})
        text_check("document", {f"doc{d}" for d in range(documents)})
    pair = request.reference is not None
    table = token_table(request.candidate_specs, pair=pair, documents=documents)
    if observer is not None:
        observer.stage("loading")
        observer.start(windows=4, positions=120)
        for _ in range(4):
            observer.advance(windows=1, positions=30, running=dict.fromkeys(request.candidate_specs, 0.01))
        observer.finish()
    reference = source(request.reference_spec) if pair else None
    document = summary(table, kind=request.kind, reference=reference)
    manifest = {"request": {"kind": request.kind, "candidates": request.candidate_specs}}
    if request.out is None:
        return Run(document, table, manifest)
    run = write_run(request.out, manifest=manifest, table=table, summary=document, overwrite=request.overwrite)
    if page:
        (request.out / PAGE).write_text("a page", encoding="utf-8")
    return run


def module(run: Callable[..., Run] = measured) -> types.ModuleType:
    """What stands for evalgate.measure.run in sys.modules."""
    fake = types.ModuleType("evalgate.measure.run")
    fake.RunRequest = RunRequest
    fake.run = run
    return fake
