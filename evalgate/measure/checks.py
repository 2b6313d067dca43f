"""What is refused of a request before anything is read or started."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from evalgate.endpoints.budget import Budget
from evalgate.endpoints.settings import EndpointSettings
from evalgate.errors import UsageError
from evalgate.measure.recordings import is_recorded
from evalgate.measure.request import Judge, RunRequest
from evalgate.specs import SourceSpec
from evalgate.stats.ratio import check_confidence
from evalgate.store.runs import check_target
from evalgate.windows import policy

_URL_OPTIONS = {  # option -> field of EndpointSettings
    "--concurrency": "concurrency",
    "--api-key-env": "key_variable",
    "--api-key-file": "key_file",
    "--header": "headers",
    "--proxy": "proxy",
    "--ca-file": "ca_file",
}
_REMOTE_OPTIONS = {
    "--dialect": "dialect",
    "--top-k": "top_k",
    "--tokenizer": "tokenizer",
    "--timeout": "timeout",
    "--patience": "patience",
}
_LLAMA_OPTIONS = ("--llama-threads", "--llama-gpu-layers")
_LOCAL_OPTIONS = {  # option -> field of RunRequest
    "--device": "device",
    "--logits": "logits",
    "--check": "check",
    "--memory": "memory",
    "--load-mode": "load_mode",
    "--revision": "revision",
    "--allow-pickle": "allow_pickle",
    "--trust-remote-code": "trust_remote_code",
    "--python": "python",
    "--allow-template": "allow_template",
}
_TEXT_OPTIONS = {  # option -> field of RunRequest
    "--data": "data",
    "--split": "split",
    "--text-column": "text_column",
    "--split-on": "split_on",
    "--windows": "windows",
    "--context": "context",
    "--stride": "stride",
    "--limit": "limit",
}


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
    if not all(spec.strip() for spec in request.specs):
        raise UsageError("a model has an empty name: check the variable behind --ref, --cand or --model")
    for candidate in request.candidates:
        if is_recorded(candidate):
            raise UsageError(f"{candidate} is a recording, which can only be the reference: name it with --ref")
    if request.budget != Budget() and not any(model.remote for model in request.models):
        raise UsageError("--budget limits what endpoints are asked and no source is one: use --limit or --positions")
    local = [o for o, field in _LOCAL_OPTIONS.items() if getattr(request, field) != getattr(RunRequest, field)]
    check_applies(request.endpoint, request.models, local=local)
    check_cluster(request)
    if request.out is not None:
        check_target(request.out, overwrite=request.overwrite)


def check_cluster(request: RunRequest) -> None:
    """Refuse a cluster for what is not loaded, and options of one that is not named. Raises UsageError."""
    options = {"--workers": "workers", "--num-cpus": "num_cpus", "--num-gpus": "num_gpus"}
    cluster = request.cluster
    if cluster is None:
        named = [option for option, field in options.items() if getattr(request, field) != getattr(RunRequest, field)]
        if named:
            raise UsageError(f"{', '.join(named)} says how a Ray cluster scores and none is named: add --ray local")
        return
    remote = next((model.spec for model in request.models if model.remote), None)
    if remote is not None:
        raise UsageError(
            f"--ray runs models that are loaded by evalgate and {remote} is asked over HTTP: leave out --ray; several "
            "URLs of one model, separated by commas, share the work"
        )
    cluster.check()


def check_recorded(request: RunRequest, judge: Judge | None) -> None:
    """Refuse what a recorded reference decides by itself, naming the options, and judging early. Raises UsageError."""
    named = [o for o, field in _TEXT_OPTIONS.items() if getattr(request, field) != getattr(RunRequest, field)]
    if named:
        raise UsageError(
            f"{request.reference} brings its own text and windows: leave out {', '.join(named)} "
            "(--positions N measures a sample, `evalgate trace cut` makes a smaller trace)"
        )
    if judge is not None or request.shuffle:
        raise UsageError("a sequential gate needs the exact KL of each document: leave out --sequential")


def inapplicable(
    models: Sequence[SourceSpec], *, reference: SourceSpec | None = None, tokenizer: bool = False
) -> frozenset[str]:
    """The options that change nothing for these sources, which `check_request` refuses where they are given.

    reference: the one among the models that may be recorded. tokenizer: whether --tokenizer is given.
    """
    kinds = {model.kind for model in models}
    found: set[str] = set()
    if not kinds & {"endpoint", "llama.cpp"}:
        found |= {*_URL_OPTIONS, *_REMOTE_OPTIONS, "--budget"}
    if "endpoint" not in kinds:
        found |= {*_URL_OPTIONS}
    if "llama.cpp" not in kinds:
        found |= {*_LLAMA_OPTIONS}
    if "embedded" not in kinds and not tokenizer:
        found |= {*_LOCAL_OPTIONS}
    if is_recorded(reference):
        found |= {*_TEXT_OPTIONS}
    return frozenset(found)


def check_applies(
    settings: EndpointSettings,
    models: Sequence[SourceSpec],
    *,
    local: Sequence[str] = (),
) -> None:
    """Refuse options that differ from their default and change nothing for these sources. Raises UsageError.

    local: options of models loaded here that differ from their default.
    """
    kinds = {model.kind for model in models}
    remote = bool(kinds & {"endpoint", "llama.cpp"})
    if not remote:
        _refuse(_changed(settings, _URL_OPTIONS | _REMOTE_OPTIONS), "endpoints")
    if "endpoint" not in kinds:
        _refuse(_changed(settings, _URL_OPTIONS), "endpoints at a URL")
    if "llama.cpp" not in kinds:
        default = EndpointSettings().llama
        changed = (settings.llama.threads != default.threads, settings.llama.gpu_layers != default.gpu_layers)
        _refuse(list(compress(_LLAMA_OPTIONS, changed)), "models named llama.cpp:FILE.gguf")
    if "embedded" not in kinds and not settings.tokenizer:
        _refuse(local, "models that are loaded here")


def _changed(settings: EndpointSettings, options: dict[str, str]) -> list[str]:
    default = EndpointSettings()
    return [option for option, field in options.items() if getattr(settings, field) != getattr(default, field)]


def _refuse(named: Sequence[str], what: str) -> None:
    if named:
        verb, them = ("applies", "it") if len(named) == 1 else ("apply", "them")
        raise UsageError(f"{', '.join(named)} {verb} to {what} and no source is one: leave {them} out")
