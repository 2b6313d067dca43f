"""The options of commands that ask endpoints, and the settings they make."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from evalgate.dialects import names
from evalgate.errors import UsageError

if TYPE_CHECKING:
    from evalgate.endpoints.settings import EndpointSettings

T = TypeVar("T")
PANEL = "Endpoints"
Result = TypeVar("Result")  # an exit code, or None


def complete_dialect(incomplete: str) -> list[str]:
    """Names of dialects that start with what was typed."""
    return [name for name in names() if name.startswith(incomplete)]


def _option(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=PANEL, **settings)


Dialect = Annotated[
    str,
    _option(
        metavar="NAME",
        autocompletion=complete_dialect,
        help=f"How to ask: {', '.join(names())}. Default: what the probe finds best.",
    ),
]
TopK = Annotated[
    int | None, _option(min=1, metavar="K", help="Alternatives per position. Default: 20, or what is served.")
]
Tokenizer = Annotated[
    str, _option(metavar="SPEC", help="Model whose tokenizer cuts the text where no side is loaded here.")
]
Concurrency = Annotated[int, _option(min=1, max=256, metavar="N", help="Most requests at once per URL.")]
Timeout = Annotated[float, _option(min=0.1, metavar="SECONDS", help="Time for one whole reply.")]
Patience = Annotated[float, _option(min=0, metavar="SECONDS", help="Time for which a failing request is repeated.")]
KeyVariable = Annotated[
    str,
    _option(
        "--api-key-env",
        metavar="VARIABLE",
        help="Environment variable with the API key. Default: EVALGATE_ENDPOINT_KEY.",
    ),
]
KeyFile = Annotated[str, _option("--api-key-file", metavar="FILE", help="File with the API key.")]
Header = Annotated[list[str] | None, _option("--header", metavar="NAME:VALUE", help="Header to send; repeatable.")]
Proxy = Annotated[str, _option(metavar="URL", help="Proxy. Default: as HTTP_PROXY and HTTPS_PROXY say.")]
CaFile = Annotated[str, _option("--ca-file", metavar="FILE", help="Certificates to trust, PEM.")]
LlamaThreads = Annotated[
    int | None, _option("--llama-threads", min=1, metavar="N", help="Threads of a llama.cpp server started here.")
]
LlamaGpuLayers = Annotated[
    int, _option("--llama-gpu-layers", min=-1, metavar="N", help="Layers on the GPU; -1 = all that fit.")
]


def endpoint_settings(
    *,
    dialect: Dialect = "",
    top_k: TopK = None,
    tokenizer: Tokenizer = "",
    concurrency: Concurrency = 16,
    timeout: Timeout = 120.0,
    patience: Patience = 30.0,
    key_variable: KeyVariable = "",
    key_file: KeyFile = "",
    header: Header = None,
    proxy: Proxy = "",
    ca_file: CaFile = "",
    llama_threads: LlamaThreads = None,
    llama_gpu_layers: LlamaGpuLayers = -1,
) -> EndpointSettings:
    """The settings that the options name. Raises UsageError for an unknown dialect or a broken header."""
    from evalgate.dialects import get
    from evalgate.endpoints.settings import EndpointSettings, LlamaSettings

    if dialect:
        get(dialect)
    if key_variable and key_file:
        raise UsageError("--api-key-env and --api-key-file both name a key: give one of them")
    return EndpointSettings(
        dialect=dialect,
        top_k=top_k,
        concurrency=concurrency,
        timeout=timeout,
        patience=patience,
        key_variable=key_variable,
        key_file=key_file,
        headers=tuple(_header(text) for text in header or ()),
        proxy=proxy,
        ca_file=ca_file,
        tokenizer=tokenizer,
        llama=LlamaSettings(llama_threads, llama_gpu_layers),
    )


def with_endpoint_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """The command with the options of `endpoint_settings` beside its own, handed to it as `endpoint`."""
    named = {"EndpointSettings": Any}  # imported for type checkers alone
    own = inspect.signature(command, eval_str=True, locals=named)
    extra = inspect.signature(endpoint_settings, eval_str=True, locals=named).parameters
    kept = [p for p in own.parameters.values() if p.name != "endpoint"]

    @wraps(command)
    def wrapped(**values: Any) -> Result:
        return command(endpoint=endpoint_settings(**{name: values.pop(name) for name in extra}), **values)

    wrapped.__signature__ = own.replace(parameters=_keyword_only([*kept, *extra.values()]))  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in wrapped.__signature__.parameters.values()}  # type: ignore[attr-defined]
    return wrapped


def _keyword_only(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    return [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or not (name + value).isascii() or not (name + value).isprintable():
        raise UsageError(f"'{name}' is not a header: write --header NAME:VALUE")
    return name.strip(), value.strip()
