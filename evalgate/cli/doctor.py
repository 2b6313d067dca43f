"""`evalgate doctor`: what is installed, what works, and what to install for the rest."""

from __future__ import annotations

from typing import Annotated

import typer

from evalgate.cli import options
from evalgate.cli.command import Invocation
from evalgate.cli.show import show_document
from evalgate.errors import CANNOT_MEASURE, PASS


def _complete_extra(incomplete: str) -> list[str]:
    from evalgate.doctor.packages import known_extras

    return [name for name in known_extras() if name.startswith(incomplete)]


def doctor(
    call: Invocation,
    extras: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[EXTRA]...", autocompletion=_complete_extra, help="Extras that must be installed and work."
        ),
    ] = None,
    device: options.Device = "auto",
    json: options.Json = False,
) -> int:
    """Show what is installed and works here. Exit 0 usable, 2 something installed or asked for is broken."""
    from evalgate.doctor import examine

    found = examine(tuple(extras or ()), device=device)
    show_document(call.output, "diagnosis", found, json=json)
    return PASS if found.usable else CANNOT_MEASURE
