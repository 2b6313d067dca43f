"""What is refused of a request before anything is read or started."""

from __future__ import annotations

from evalgate.endpoints.budget import Budget
from evalgate.errors import UsageError
from evalgate.measure.applicable import check_applies
from evalgate.measure.recordings import is_recorded
from evalgate.measure.request import Judge, RunRequest
from evalgate.specs import parse
from evalgate.stats.clustered import check_confidence
from evalgate.store.runs import check_target
from evalgate.windows import policy


def check_request(request: RunRequest) -> None:
    """Refuse what no kind of measurement can honour. Raises UsageError."""
    if not request.candidates:
        raise UsageError("name at least one model to measure")
    if request.reference is None and request.kind != "ppl":
        raise UsageError("a comparison needs a reference: name one, or measure perplexity alone")
    check_confidence(request.confidence)
    if request.limit is not None and request.limit < 1:
        raise UsageError(f"--limit {request.limit} leaves nothing to measure: give at least 1 window")
    if request.context is not None:
        policy(request.windows, context=request.context, stride=request.stride)
    specs = [spec for spec in (request.reference, *request.candidates) if spec is not None]
    if not all(spec.strip() for spec in specs):
        raise UsageError("a model has an empty name: check the variable behind --ref, --cand or --model")
    for spec in request.candidates:
        if is_recorded(spec):
            raise UsageError(f"{spec} is a recording, which can only be the reference: name it with --ref")
    if request.budget != Budget() and not any(parse(spec).remote for spec in specs):
        raise UsageError("--budget limits what endpoints are asked and no source is one: use --limit or --positions")
    check_applies(request.endpoint, specs, device=request.device, logits=request.logits)
    if request.out is not None:
        check_target(request.out, overwrite=request.overwrite)


def check_recorded(request: RunRequest, judge: Judge | None) -> None:
    """Refuse what a recorded reference decides by itself, naming the options, and judging early. Raises UsageError."""
    given = {
        "--data": request.data,
        "--split": request.split,
        "--text-column": request.text_column,
        "--windows": None if request.windows == RunRequest.windows else request.windows,
        "--context": request.context,
        "--stride": request.stride,
        "--limit": request.limit,
    }
    named = [option for option, value in given.items() if value is not None]
    if named:
        raise UsageError(
            f"{request.reference} brings its own text and windows: leave out {', '.join(named)} "
            "(--positions N measures a sample, `evalgate trace cut` makes a smaller trace)"
        )
    if judge is not None or request.shuffle:
        raise UsageError("a sequential gate needs the exact KL of each document: leave out --sequential")
