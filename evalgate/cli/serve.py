"""`evalgate serve`: this process becomes the scoring server."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from evalgate.cli.command import Invocation
from evalgate.cli.completion import complete_source
from evalgate.cli.streams import say
from evalgate.errors import UsageError
from evalgate.printable import printable

if TYPE_CHECKING:
    from evalgate.server.kept import Kept

IDLE_MINUTES = 30.0

_NEEDED = ("torch", "transformers", "fastapi", "uvicorn")


def serve(
    call: Invocation,
    specs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SPEC...",
            autocompletion=complete_source,
            help="Models to serve. Every option of `python -m serve` may be given too: `python -m serve --help`.",
        ),
    ] = None,
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
    keep: Annotated[
        bool, typer.Option("--keep", help="Start a server that runs here find and use, and return.")
    ] = False,
    idle_minutes: Annotated[
        float, typer.Option(min=0.01, metavar="N", help="End a kept server after N minutes without a request.")
    ] = IDLE_MINUTES,
    list_kept: Annotated[bool, typer.Option("--list", help="Show the kept servers.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End the kept servers.")] = False,
) -> None:
    """Serve models with exact log-probabilities over an OpenAI-compatible API."""
    if list_kept or stop:
        if specs or keep or (list_kept and stop) or host or port is not None or api_key_env:
            raise UsageError("--list and --stop are of all kept servers: give one of them, alone")
        call.output.write(show_kept() if list_kept else stop_kept())
        return
    if not specs:
        raise UsageError("SPEC... is missing: name it after the command")
    if any(importlib.util.find_spec(name) is None for name in _NEEDED):
        raise UsageError("serving needs torch and transformers: pip install 'evalgate-lm[serve]'")
    if keep:
        if host or port is not None or api_key_env:
            raise UsageError("a kept server has a port and a key of its own: leave out --host, --port, --api-key-env")
        call.output.write(keep_server(specs, device=device or "auto", idle=60 * idle_minutes))
        return
    given = {"--host": host, "--port": port, "--device": device, "--api-key-env": api_key_env}
    command = server_command(specs, {name: str(value) for name, value in given.items() if value is not None})
    os.execv(command[0], command)


def server_command(specs: Sequence[str], given: dict[str, str]) -> list[str]:
    """Argument vector of the server: the options that were given, then the specs and the server's own options."""
    from evalgate.server.process import module_command

    options_given = [part for item in given.items() for part in item]
    return [*module_command("serve"), *options_given, *specs]


def keep_server(specs: Sequence[str], *, device: str, idle: float) -> str:
    """Start a kept server; returns the line that says so. specs: with --logits, the one option that runs have too."""
    from evalgate.server.kept import keep

    models, logits = _with_logits(specs)
    unknown = next((word for word in models if word.startswith("-")), None)
    if unknown is not None:
        raise UsageError(f"--keep is for runs, which ask for no {unknown}: of the server's options only --logits goes")
    kept = keep(models, device=device, logits=logits, idle=idle, on_stage=say)
    return f"{_line(kept)}\n"


def _with_logits(words: Sequence[str]) -> tuple[list[str], str]:
    models, logits = list(words), "float32"
    for at, word in enumerate(models):
        if word == "--logits" or word.startswith("--logits="):
            width = 1 if "=" in word else 2
            logits = word.partition("=")[2] if "=" in word else (models[at + 1 : at + 2] or [""])[0]
            if logits not in ("float32", "model"):
                raise UsageError(f"--logits is '{logits}': use float32 or model")
            return models[:at] + models[at + width :], logits
    return models, logits


def show_kept() -> str:
    """A line for each kept server."""
    from evalgate.server.kept import all_kept

    return "".join(f"{_line(kept)}\n" for kept in all_kept()) or "no server is kept\n"


def stop_kept() -> str:
    """End the kept servers; a line for each."""
    from evalgate.server.kept import all_kept

    ended = []
    for kept in all_kept():
        kept.end()
        ended.append(f"ended process {kept.pid}: {printable(', '.join(kept.files))}\n")
    return "".join(ended) or "no server is kept\n"


def _line(kept: Kept) -> str:
    models = printable(", ".join(kept.files))
    return f"process {kept.pid} keeps {models}; it ends after {kept.idle / 60:g} minutes without a request"
