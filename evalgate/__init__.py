"""evalgate: is the candidate still the same model as the reference?

The Python API, for notebooks and scripts. Nothing heavy is imported until a function is called.

    run = evalgate.compare("demo", "demo@int8", data="texts/")
    run.summary        # figures with intervals (evalgate.summary.Summary)
    run.tokens         # one row per position, a pandas frame
    run.plot.kl()      # a plotly figure; a notebook shows the run itself too
    evalgate.sweep("demo", ["demo@int8", "demo@bf16"])  # a leaderboard; see evalgate.sweeps.Sweep
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, get_type_hints

from evalgate.errors import EvalgateError

if TYPE_CHECKING:
    from evalgate.endpoints.budget import Budget
    from evalgate.endpoints.settings import EndpointSettings
    from evalgate.measure.request import Observer, RunRequest
    from evalgate.notebook import ShownRun
    from evalgate.sweeps import Sweep

__all__ = ["EvalgateError", "Options", "compare", "load", "perplexity", "sweep"]


class Options(TypedDict, total=False):
    """Keywords of `compare` and `perplexity`: what the options of `evalgate kl` are called in Python."""

    split: str | None
    text_column: str | None
    split_on: str | None
    windows: str
    context: int | None
    stride: int | None
    limit: int | None
    seed: int
    confidence: float
    device: str
    logits: Literal["float32", "model"]
    out: str | Path | None
    resume: bool
    overwrite: bool
    endpoint: EndpointSettings
    positions: int | None
    budget: Budget
    noise_floor: bool
    shuffle: bool
    check: bool
    cache: bool
    load_mode: Literal["native", "dequantized", "both"]
    revision: str | None
    allow_pickle: bool
    trust_remote_code: bool
    python: str | None
    allow_template: bool
    memory: str | None
    ray: str | None
    workers: int
    num_cpus: float
    num_gpus: float
    observer: Observer | None


def compare(
    ref: str, cand: str | Sequence[str], *, data: str | Path | None = None, **options: Unpack[Options]
) -> ShownRun:
    """Compare candidates with a reference on the same text, exactly.

    ref, cand: source specs (checkpoint folder, hub id, GGUF file, "demo"; "@bf16", "@int8" ... convert on load).
    data: a file, folder, hub data set, or None for evalgate's own corpus. options: see `Options`, and
    `evalgate.measure.request.RunRequest` for what each means. Raises EvalgateError.
    """
    candidates = (cand,) if isinstance(cand, str) else tuple(cand)
    return _run("kl", ref, candidates, dict(options), data=data)


def perplexity(model: str | Sequence[str], *, data: str | Path | None = None, **options: Unpack[Options]) -> ShownRun:
    """Perplexity and bits per byte of one model or several; arguments as in `compare`."""
    models = (model,) if isinstance(model, str) else tuple(model)
    return _run("ppl", None, models, dict(options), data=data)


def sweep(
    ref: str,
    cands: Sequence[str] | Mapping[str, str],
    *,
    data: str | Path | None = None,
    sizes: Mapping[str, int] | None = None,
    **options: Unpack[Options],
) -> Sweep:
    """Rank candidates against one reference, as `evalgate sweep` does; its folder is `out`, else below runs/.

    cands: specs, or {name: spec}. sizes: {spec: bytes} of weights that cannot be counted. Other arguments as in
    `compare`. The same call resumes a sweep that was interrupted. Raises EvalgateError where nothing could be measured.
    """
    from evalgate.cli.options import new_folder
    from evalgate.measure.sweep import SweepRequest
    from evalgate.sweeps import run_sweep
    from evalgate.sweeps.names import named

    names = {spec: name for name, spec in cands.items()} if isinstance(cands, Mapping) else {}
    specs = (
        tuple(cands.values()) if isinstance(cands, Mapping) else (cands,) if isinstance(cands, str) else tuple(cands)
    )
    request, observer = _request("kl", ref, specs, dict(options), data=data)
    candidates = named(request.candidates, names, sizes)
    return run_sweep(SweepRequest(request, candidates), new_folder=lambda: new_folder("sweep"), observer=observer)


def load(folder: str | Path) -> ShownRun:
    """A run folder, or its URL, that `evalgate kl`, `agree` or `ppl` wrote, checked against its manifest."""
    from evalgate.measure.stored import read_run
    from evalgate.notebook import ShownRun
    from evalgate.store.remote import place

    return ShownRun.of(read_run(place(str(folder))))


def _run(
    kind: Literal["kl", "ppl"],
    reference: str | None,
    candidates: tuple[str, ...],
    options: dict[str, Any],
    *,
    data: str | Path | None,
) -> ShownRun:
    from evalgate.measure.run import run
    from evalgate.notebook import ShownRun

    request, observer = _request(kind, reference, candidates, options, data=data)
    return ShownRun.of(run(request, observer=observer))


def _request(
    kind: Literal["kl", "ppl"],
    reference: str | None,
    candidates: tuple[str, ...],
    options: dict[str, Any],
    *,
    data: str | Path | None,
) -> tuple[RunRequest, Observer | None]:
    """The request for these options, and its observer. Raises UsageError for an option that is unknown or of no use."""
    from evalgate.errors import UsageError, choose
    from evalgate.measure.request import RunRequest
    from evalgate.store.remote import place

    set_here = ("kind", "reference", "candidates")
    known = [name for name in RunRequest.__dataclass_fields__ if name not in set_here]
    unknown = next((name for name in options if name not in (*known, "observer")), None)
    if unknown is not None:
        raise UsageError(f"there is no option '{unknown}': {choose(unknown, [*known, 'observer'])}")
    observer = options.pop("observer", None)
    _check_types(RunRequest, options)
    out = options.pop("out", None)
    where = {"data": None if data is None else str(data), "out": None if out is None else place(str(out))}
    return RunRequest.of(kind, reference, candidates, **where, **options), observer


def _check_types(request: type[RunRequest], options: dict[str, Any]) -> None:
    """Raise UsageError naming an option whose value is of another type than the request's field, before any work."""
    from pydantic import TypeAdapter, ValidationError

    from evalgate.errors import UsageError

    kinds: dict[str, Any] = {**get_type_hints(request), "out": str | Path | None}
    for name, value in options.items():
        try:
            TypeAdapter(kinds[name]).validate_python(value, strict=True)
        except ValidationError as error:
            said = " or ".join(dict.fromkeys(e["msg"].removeprefix("Input should be ") for e in error.errors()))
            raise UsageError(f"the option '{name}' is {value!r} and should be {said}") from None
