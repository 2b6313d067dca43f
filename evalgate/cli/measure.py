"""`evalgate kl`, `evalgate agree` and `evalgate ppl`: measure, store, print the block or the document."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from evalgate.cli import options
from evalgate.cli.endpoint_options import with_endpoint_options
from evalgate.cli.options import LogitsDtype, WindowPreset
from evalgate.cli.session import Session
from evalgate.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from evalgate.endpoints.budget import Budget
    from evalgate.endpoints.settings import EndpointSettings
    from evalgate.measure.run import Judge, RunRequest
    from evalgate.store.runs import Run

RUNS = Path("runs")


def comparison(kind: Literal["kl", "agree"], help: str) -> Callable[..., None]:
    """The command that measures candidates against a reference; `kind` is what its block leads with."""

    def command(
        ctx: typer.Context,
        endpoint: EndpointSettings,
        ref: options.Reference,
        cand: options.Candidates,
        data: options.Data = None,
        split: options.Split = None,
        text_column: options.TextColumn = None,
        windows: options.Windows = WindowPreset.DISJOINT,
        context: options.Context = None,
        stride: options.Stride = None,
        limit: options.Limit = None,
        positions: options.Positions = None,
        budget: options.BudgetText = None,
        seed: options.Seed = 0,
        confidence: options.Confidence = 0.95,
        device: options.Device = "auto",
        logits: options.Logits = LogitsDtype.FLOAT32,
        out: options.Out = None,
        json: options.Json = False,
        quiet: options.Quiet = False,
        overwrite: options.Overwrite = False,
        resume: options.Resume = True,
        noise_floor: options.NoiseFloor = False,
        debug: options.Debug = False,
    ) -> None:
        session = start(ctx, cand, confidence)
        check_floor(noise_floor, [ref, *cand])
        from evalgate.measure.run import RunRequest

        request = RunRequest(
            kind=kind,
            reference=ref,
            candidates=tuple(cand),
            data=data,
            split=split,
            text_column=text_column,
            windows=windows.value,
            context=context,
            stride=stride,
            limit=limit,
            seed=seed,
            confidence=confidence,
            device=device,
            logits=logits.value,
            out=target(kind, out, overwrite=overwrite),
            resume=resume,
            overwrite=overwrite,
            endpoint=endpoint,
            positions=positions,
            budget=budget_of(budget),
            noise_floor=noise_floor,
        )
        _report(session, measured(request, quiet=quiet), json=json, quiet=quiet)

    command.__doc__ = help
    return with_endpoint_options(command)


@with_endpoint_options
def ppl(
    ctx: typer.Context,
    endpoint: EndpointSettings,
    model: options.Models,
    data: options.Data = None,
    split: options.Split = None,
    text_column: options.TextColumn = None,
    windows: options.Windows = WindowPreset.DISJOINT,
    context: options.Context = None,
    stride: options.Stride = None,
    limit: options.Limit = None,
    positions: options.Positions = None,
    budget: options.BudgetText = None,
    seed: options.Seed = 0,
    confidence: options.Confidence = 0.95,
    device: options.Device = "auto",
    logits: options.Logits = LogitsDtype.FLOAT32,
    out: options.Out = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    overwrite: options.Overwrite = False,
    resume: options.Resume = True,
    debug: options.Debug = False,
) -> None:
    """Perplexity and bits per byte of models on a text, with intervals."""
    session = start(ctx, model, confidence)
    from evalgate.measure.run import RunRequest

    request = RunRequest(
        kind="ppl",
        reference=None,
        candidates=tuple(model),
        data=data,
        split=split,
        text_column=text_column,
        windows=windows.value,
        context=context,
        stride=stride,
        limit=limit,
        seed=seed,
        confidence=confidence,
        device=device,
        logits=logits.value,
        out=target("ppl", out, overwrite=overwrite),
        resume=resume,
        overwrite=overwrite,
        endpoint=endpoint,
        positions=positions,
        budget=budget_of(budget),
    )
    _report(session, measured(request, quiet=quiet), json=json, quiet=quiet)


def start(ctx: typer.Context, models: Sequence[str], confidence: float) -> Session:
    """Guard standard output, before anything heavy is imported, and check what no single option can."""
    session: Session = ctx.obj
    session.output.guard()
    twice = sorted({spec for spec in models if models.count(spec) > 1})
    if twice:
        raise UsageError(f"{twice[0]} is given twice: name each model once", spec=twice[0])
    if not 0 < confidence < 1:
        raise UsageError(f"--confidence {confidence} is outside (0, 1): write 0.95 for 95 %", confidence=confidence)
    return session


def check_floor(asked: bool, models: Sequence[str]) -> None:
    """Refuse --noise-floor where some side is an endpoint. Raises UsageError."""
    from evalgate.specs import parse

    remote = next((spec for spec in models if parse(spec).remote), None)
    if asked and remote is not None:
        raise UsageError(f"--noise-floor restarts and rebatches models and {remote} is not run here: leave it out")


def budget_of(text: str | None) -> Budget:
    """What --budget says; no limit where it was not given."""
    from evalgate.endpoints.budget import Budget

    return Budget() if text is None else Budget.parse(text)


def target(kind: str, out: Path | None, *, overwrite: bool) -> Path:
    """The run folder, checked before hours are spent: `out`, or runs/KIND-UTC TIME with a number where taken."""
    from evalgate.store.runs import check_target

    if out is not None:
        check_target(out, overwrite=overwrite)
        return out
    stem = f"{kind}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    number, folder = 1, RUNS / stem
    while folder.exists():
        number += 1
        folder = RUNS / f"{stem}-{number}"
    return folder


def measured(request: RunRequest, *, quiet: bool, judge: Judge | None = None) -> Run:
    """Run the request under a progress observer; an interrupt says how to go on. judge: may end it early."""
    from evalgate.cli.progress import observer
    from evalgate.measure.run import run

    watcher = None if quiet else observer(sys.stderr, noun="nll" if request.kind == "ppl" else "KL")
    try:
        return run(request, observer=watcher) if judge is None else run(request, observer=watcher, judge=judge)
    except KeyboardInterrupt:
        raise Interrupted("stopped: the same command goes on from the last windows it measured") from None
    finally:
        if watcher is not None:
            watcher.finish()


def _report(session: Session, run: Run, *, json: bool, quiet: bool) -> None:
    from evalgate.cli.stored import print_summary

    print_summary(session.output, run.summary, json=json)
    if run.folder is not None and not quiet:
        sys.stderr.write(f"run folder: {run.folder}\n")
