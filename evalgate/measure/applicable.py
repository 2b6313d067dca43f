"""Which options have an effect on which sources; the others are refused by name, before anything is started."""

from __future__ import annotations

from collections.abc import Sequence

from evalgate.endpoints.settings import EndpointSettings
from evalgate.errors import UsageError
from evalgate.specs import parse

URL = {  # option -> field of EndpointSettings
    "--concurrency": "concurrency",
    "--api-key-env": "key_variable",
    "--api-key-file": "key_file",
    "--header": "headers",
    "--proxy": "proxy",
    "--ca-file": "ca_file",
}
REMOTE = {
    "--dialect": "dialect",
    "--top-k": "top_k",
    "--tokenizer": "tokenizer",
    "--timeout": "timeout",
    "--patience": "patience",
}


def check_applies(
    settings: EndpointSettings, specs: Sequence[str], *, device: str = "auto", logits: str = "float32"
) -> None:
    """Refuse options that differ from their default and change nothing for these sources. Raises UsageError."""
    kinds = {parse(spec).kind for spec in specs}
    remote = bool(kinds & {"endpoint", "llama.cpp"})
    if not remote:
        _refuse(_changed(settings, URL | REMOTE), "endpoints")
    if "endpoint" not in kinds:
        _refuse(_changed(settings, URL), "endpoints at a URL")
    if "llama.cpp" not in kinds:
        default = EndpointSettings().llama
        llama = [
            *(["--llama-threads"] if settings.llama.threads != default.threads else []),
            *(["--llama-gpu-layers"] if settings.llama.gpu_layers != default.gpu_layers else []),
        ]
        _refuse(llama, "models named llama.cpp:FILE.gguf")
    if "embedded" not in kinds and not settings.tokenizer:
        local = [*(["--device"] if device != "auto" else []), *(["--logits"] if logits != "float32" else [])]
        _refuse(local, "models that are loaded here")


def _changed(settings: EndpointSettings, options: dict[str, str]) -> list[str]:
    default = EndpointSettings()
    return [option for option, field in options.items() if getattr(settings, field) != getattr(default, field)]


def _refuse(named: Sequence[str], what: str) -> None:
    if named:
        verb, them = ("applies", "it") if len(named) == 1 else ("apply", "them")
        raise UsageError(f"{', '.join(named)} {verb} to {what} and no source is one: leave {them} out")
