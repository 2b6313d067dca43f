"""An import that waits: nothing of the package is loaded until something of it is called."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from serve.models import later


NAMES = ("slowpack.inner.support",)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    inner = tmp_path / "slowpack" / "inner"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").write_text("")
    (inner / "__init__.py").write_text("")
    (inner / "support.py").write_text("def doubled(x, *, more=0):\n    return 2 * x + more\n")
    (tmp_path / "user.py").write_text("from slowpack.inner.support import doubled\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("slowpack", "slowpack.inner", "slowpack.inner.support", "user"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(sys.modules, name, None)  # so that what the test imports is taken out again
        del sys.modules[name]
    return "slowpack"


def test_what_was_taken_is_imported_when_it_is_called(package: str) -> None:
    with later.imported_later(NAMES):
        user = import_module("user")
    assert not [name for name in sys.modules if name.startswith(package)]
    assert user.doubled(4, more=1) == 9
    assert "slowpack.inner.support" in sys.modules
    assert import_module("slowpack.inner.support").doubled is not user.doubled


def test_what_is_there_already_is_left_alone(package: str) -> None:
    support = import_module("slowpack.inner.support")
    with later.imported_later(NAMES):
        assert import_module("user").doubled is support.doubled
    assert sys.modules["slowpack.inner.support"] is support


def test_an_import_that_fails_leaves_no_stand_in(package: str) -> None:
    with pytest.raises(ZeroDivisionError), later.imported_later(NAMES):
        assert not hasattr(import_module("slowpack.inner.support"), "__path__")
        raise ZeroDivisionError
    assert "slowpack.inner.support" not in sys.modules
