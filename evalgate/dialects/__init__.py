"""Dialects: how an endpoint is asked for log-probabilities. One file each; its name is its name on the CLI.

A file of this folder that defines `DIALECT` is a dialect; the others are what dialects are made of.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from evalgate.dialects.base import Dialect
from evalgate.errors import UsageError, choose


@cache
def _registry(path: tuple[str, ...]) -> dict[str, Dialect]:
    """Every dialect of these folders by name. The folders are the key: one that is added later is read as well."""
    found: dict[str, Dialect] = {}
    for module in iter_modules(path):
        dialect = getattr(import_module(f"{__name__}.{module.name}"), "DIALECT", None)
        if isinstance(dialect, Dialect):
            found[module.name] = dialect
    return found


def names() -> tuple[str, ...]:
    """Names of all dialects, in alphabetical order."""
    return tuple(sorted(_registry(tuple(__path__))))


def in_order() -> tuple[Dialect, ...]:
    """All dialects in the order in which the probe prefers them, those of one order by name."""
    return tuple(sorted(_registry(tuple(__path__)).values(), key=lambda dialect: (dialect.order, dialect.name)))


def get(name: str) -> Dialect:
    """The dialect of that name; UsageError where there is none."""
    try:
        return _registry(tuple(__path__))[name]
    except KeyError:
        raise UsageError(f"there is no dialect '{name}': {choose(name, names())}") from None
