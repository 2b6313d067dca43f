"""`evalgate serve`: this process becomes the scoring server."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Annotated

import typer

from evalgate.cli.completion import complete_source
from evalgate.errors import UsageError

_NEEDED = ("torch", "transformers", "fastapi", "uvicorn")


def serve(
    specs: Annotated[
        list[str],
        typer.Argument(
            metavar="SPEC...",
            autocompletion=complete_source,
            help="Models to serve. Every option of `python -m serve` may be given too: `python -m serve --help`.",
        ),
    ],
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to listen on. Default: only this machine.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, metavar="PORT", help="Port to listen on; 0 takes a free one.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Where models loaded here run: auto, cpu, cuda, cuda:1.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="Environment variable that holds the API key.")
    ] = None,
) -> None:
    """Serve models with exact log-probabilities over an OpenAI-compatible API."""
    if any(importlib.util.find_spec(name) is None for name in _NEEDED):
        raise UsageError("serving needs torch and transformers: pip install 'evalgate-lm[serve]'")
    given = {"--host": host, "--port": port, "--device": device, "--api-key-env": api_key_env}
    command = server_command(specs, {name: str(value) for name, value in given.items() if value is not None})
    os.execv(command[0], command)


def server_command(specs: Sequence[str], given: dict[str, str]) -> list[str]:
    """Argument vector of the server: the options that were given, then the specs and the server's own options."""
    from evalgate.server.process import module_command

    options_given = [part for item in given.items() for part in item]
    return [*module_command("serve"), *options_given, *specs]
