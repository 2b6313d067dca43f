"""evalgate: is the candidate still the same model as the reference?

The Python API, for notebooks and scripts. Nothing heavy is imported until a function is called.

    run = evalgate.compare("demo", "demo@int8", data="texts/")
    run.summary        # figures with intervals (evalgate.summary.Summary)
    run.tokens         # one row per position, a pandas frame
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalgate.errors import EvalgateError

if TYPE_CHECKING:
    from evalgate.runs import Run

__all__ = ["EvalgateError", "compare", "load", "perplexity"]


def compare(ref: str, cand: str | Sequence[str], *, data: str | Path | None = None, **options: Any) -> Run:
    """Compare candidates with a reference on the same text, exactly.

    ref, cand: source specs (checkpoint folder, hub id, GGUF file, "demo"; "@bf16", "@int8" ... convert on load).
    data: a file, folder, hub data set, or None for the built-in corpus. options: fields of
    `evalgate.pipeline.RunRequest` (windows, context, stride, limit, seed, confidence, device, out, ...).
    Raises EvalgateError.
    """
    candidates = (cand,) if isinstance(cand, str) else tuple(cand)
    return _run(kind="kl", reference=ref, candidates=candidates, data=data, **options)


def perplexity(model: str | Sequence[str], *, data: str | Path | None = None, **options: Any) -> Run:
    """Perplexity and bits per byte of one model or several; arguments as in `compare`."""
    models = (model,) if isinstance(model, str) else tuple(model)
    return _run(kind="ppl", reference=None, candidates=models, data=data, **options)


def load(folder: str | Path) -> Run:
    """A run folder that `evalgate kl`, `agree` or `ppl` wrote, checked against its manifest."""
    from evalgate.runs import read_run

    return read_run(Path(folder))


def _run(*, data: str | Path | None, observer: Any = None, **fields: Any) -> Run:
    from evalgate.errors import UsageError
    from evalgate.pipeline import RunRequest, run

    known = RunRequest.__dataclass_fields__
    unknown = next((name for name in fields if name not in known), None)
    if unknown is not None:
        raise UsageError(f"there is no option '{unknown}': use one of {', '.join(known)}")
    out = fields.pop("out", None)
    request = RunRequest(data=None if data is None else str(data), out=None if out is None else Path(out), **fields)
    return run(request, observer=observer)
