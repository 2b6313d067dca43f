"""What import-linter cannot say by pattern: real alternatives in a room do not import each other."""

from __future__ import annotations

import pkgutil
from importlib import import_module

import grimp
import pytest

from evalgate import dialects, metrics

ROOMS = {
    "evalgate.metrics": tuple(metrics.registry()),
    "evalgate.dialects": dialects.names(),
    "evalgate.reports": tuple(
        m.name for m in pkgutil.iter_modules(import_module("evalgate.reports").__path__) if not m.name.startswith("_")
    ),
}


@pytest.mark.parametrize("room", ROOMS)
def test_siblings_do_not_import_each_other(room: str) -> None:
    graph = grimp.build_graph("evalgate")
    assert len(ROOMS[room]) >= 4
    for name in ROOMS[room]:
        others = {f"{room}.{other}" for other in ROOMS[room]} - {f"{room}.{name}"}
        assert not graph.find_modules_directly_imported_by(f"{room}.{name}") & others, name
