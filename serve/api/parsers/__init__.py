"""Parsers of model output, one file per format; its file name is its name on the command line.

Each has `PARSER` (a factory) and `KIND` ("reasoning" or "tools") and `fits(template)`, which recognises by
the chat template whether the model writes that format.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from types import ModuleType

from serve.errors import BadRequest

OFF, AUTO = "none", "auto"


@cache
def parsers(kind: str) -> dict[str, ModuleType]:
    """The parser modules of a kind by name, in alphabetical order."""
    found = {m.name: import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)}
    return {name: module for name, module in sorted(found.items()) if kind == module.KIND}


def pick(kind: str, name: str, template: str) -> ModuleType | None:
    """The parser called `name`; "auto" finds one by the chat template; None where none fits or it is off."""
    if name == OFF:
        return None
    known = parsers(kind)
    if name == AUTO:
        return next((module for module in known.values() if module.fits(template)), None)
    if name not in known:
        raise BadRequest(f"'{name}' is not a {kind} parser: use one of {', '.join(known)}")
    return known[name]
