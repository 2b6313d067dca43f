"""The options of commands that ask endpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evalgate.cli.command import OptionGroup
from evalgate.cli.completion import complete_dialect, complete_source
from evalgate.cli.help import ENDPOINTS
from evalgate.dialects import names
from evalgate.errors import UsageError

if TYPE_CHECKING:
    from evalgate.endpoints.settings import EndpointSettings


def _option(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=ENDPOINTS, **settings)


@dataclass(frozen=True, kw_only=True)
class EndpointOptions(OptionGroup):
    """How endpoints are asked: the options of kl, agree, ppl, gate, probe and verify."""

    dialect: Annotated[
        str,
        _option(
            metavar="NAME",
            autocompletion=complete_dialect,
            help=f"How to ask: {', '.join(names())}. Default: what the probe finds best.",
        ),
    ] = ""
    top_k: Annotated[
        int | None, _option(min=1, metavar="K", help="Alternatives per position. Default: 20, or what is served.")
    ] = None
    tokenizer: Annotated[
        str,
        _option(
            metavar="SPEC",
            autocompletion=complete_source,
            help="Model whose tokenizer cuts the text where no side is loaded here.",
        ),
    ] = ""
    concurrency: Annotated[int, _option(min=1, max=256, metavar="N", help="Most requests at once per URL.")] = 16
    timeout: Annotated[float, _option(min=0.1, metavar="SECONDS", help="Time for one whole reply.")] = 120.0
    patience: Annotated[
        float, _option(min=0, metavar="SECONDS", help="Time for which a failing request is repeated.")
    ] = 30.0
    key_variable: Annotated[
        str,
        _option(
            "--api-key-env",
            metavar="VARIABLE",
            help="Environment variable with the API key. Default: EVALGATE_ENDPOINT_KEY.",
        ),
    ] = ""
    key_file: Annotated[str, _option("--api-key-file", metavar="FILE", help="File with the API key.")] = ""
    header: Annotated[
        list[str] | None, _option("--header", metavar="NAME:VALUE", help="Header to send; repeatable.")
    ] = None
    proxy: Annotated[str, _option(metavar="URL", help="Proxy. Default: as HTTP_PROXY and HTTPS_PROXY say.")] = ""
    ca_file: Annotated[str, _option("--ca-file", metavar="FILE", help="Certificates to trust, PEM.")] = ""
    llama_threads: Annotated[
        int | None, _option("--llama-threads", min=1, metavar="N", help="Threads of a llama.cpp server started here.")
    ] = None
    llama_gpu_layers: Annotated[
        int, _option("--llama-gpu-layers", min=-1, metavar="N", help="Layers on the GPU; -1 = all that fit.")
    ] = -1

    def settings(self) -> EndpointSettings:
        """The settings that the options name. Raises UsageError for an unknown dialect or a broken header."""
        from evalgate.dialects import get
        from evalgate.endpoints.settings import EndpointSettings, LlamaSettings

        if self.dialect:
            get(self.dialect)
        if self.key_variable and self.key_file:
            raise UsageError("--api-key-env and --api-key-file both name a key: give one of them")
        return EndpointSettings(
            dialect=self.dialect,
            top_k=self.top_k,
            concurrency=self.concurrency,
            timeout=self.timeout,
            patience=self.patience,
            key_variable=self.key_variable,
            key_file=self.key_file,
            headers=tuple(_header(text) for text in self.header or ()),
            proxy=self.proxy,
            ca_file=self.ca_file,
            tokenizer=self.tokenizer,
            llama=LlamaSettings(self.llama_threads, self.llama_gpu_layers),
        )


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or not (name + value).isascii() or not (name + value).isprintable():
        raise UsageError(f"'{name}' is not a header: write --header NAME:VALUE")
    return name.strip(), value.strip()
