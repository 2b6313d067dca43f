"""What candidates are called where the user gives no names: short, and none twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from evalgate.errors import UsageError
from evalgate.measure.sweep import Candidate
from evalgate.specs import SourceSpec


def named(
    sources: Sequence[SourceSpec], names: Mapping[str, str] | None = None, sizes: Mapping[str, int] | None = None
) -> tuple[Candidate, ...]:
    """The candidates with their names. names, sizes: by spec, as the user gives them.

    Without a name, a model on this disk is called as its file or folder, unless two are called so; any other is called
    as its spec. Raises UsageError for a name that is empty or given twice.
    """
    given, known = dict(names or {}), dict(sizes or {})
    short = [_short(source) for source in sources]
    found = []
    for source, name in zip(sources, short, strict=True):
        plain = name if short.count(name) == 1 else source.spec
        found.append(Candidate(source, given.get(source.spec, plain), known.get(source.spec)))
    called = [candidate.name for candidate in found]
    twice = next((name for name in called if called.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"two candidates are called {twice}: give each its own name")
    if not all(name.strip() for name in called):
        raise UsageError("a candidate's name is empty: give it one, or leave `name` out")
    return tuple(found)


def _short(source: SourceSpec) -> str:
    if source.kind != "embedded":
        return source.spec
    stem, at, conversion = source.spec.rpartition("@")
    for path, end in ((source.spec, ""), (stem, f"{at}{conversion}")):
        if path and ("/" in path or "\\" in path) and Path(path).expanduser().exists():
            return Path(path).expanduser().resolve().name + end
    return source.spec
