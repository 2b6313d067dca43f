"""Whether escape sequences are wanted: decided here, for documents, progress and help alike.

`--color always` and `--color never` are put into the environment, where the servers that are started find them too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence


def wanted(*, terminal: bool, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether to color what goes to a stream. terminal: it is one.

    NO_COLOR (https://no-color.org) goes first, then FORCE_COLOR (https://force-color.org), each where it is not empty;
    then a terminal is colored unless TERM is `dumb` or not set.
    """
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR"):
        return True
    return terminal and moves(environment)


def moves(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the terminal takes escape sequences, so that a line can be drawn again."""
    return environment.get("TERM", "dumb") not in ("dumb", "")


def apply(args: Sequence[str], environment: MutableMapping[str, str] = os.environ) -> None:
    """Put a typed `--color always` or `--color never` into the environment; any other value is left to the parser."""
    typed = list(args[: args.index("--")] if "--" in args else args)
    for place, word in enumerate(typed):
        option, equals, value = word.partition("=")
        if option != "--color":
            continue
        chosen = value if equals else next(iter(typed[place + 1 :]), "")
        if chosen == "always":
            environment.pop("NO_COLOR", None)
            environment["FORCE_COLOR"] = "1"
        elif chosen == "never":
            environment.pop("FORCE_COLOR", None)
            environment["NO_COLOR"] = "1"
