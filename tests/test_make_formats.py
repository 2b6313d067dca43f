"""The page of formats: a row for each, its interval, and what a user is told of those that do not work."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILE = Path(__file__).parents[1] / "reports" / "make_formats.py"


@pytest.fixture(scope="module")
def made() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_formats", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def figure(value: float, exactness: str = "exact", low: float | None = 0.01) -> dict[str, Any]:
    return {"value": value, "low": low, "high": 0.5, "exactness": exactness}


def test_page(made: ModuleType) -> None:
    row = {
        "name": "a",
        "made": True,
        "kl": figure(0.0267),
        "top1": figure(0.9),
        "ratio": figure(1.01, low=None),
        "load_mode": "a W8A8, as loaded",
        "activations": ["INT8 a token, dynamic"],
        "compute": "float32",
        "bytes": 123456789,
        "bits": 8.25,
        "load_seconds": 3.21,
    }
    document = {
        "formats": [
            row,
            {"name": "b", "made": False, "reason": "RuntimeError: a | b"},
            {"name": "a", "made": True, "alone": True, "reason": "needs <it>"},
        ],
        "kernels": [{**row, "name": "Q8_0", "kl": figure(0.001, "bounded")}, {"name": "Q2_K", "reason": "no file"}],
        "versions": {"here": {"torch": "2"}, "hqq": {"torch": "3"}},
        "positions": 1143,
        "documents": 9,
    }
    page = made.page(document)
    assert (
        "| a | 0.0267 [0.01, 0.5] | 90.0 % [1.0, 50.0] | 1.01 [open, 0.5] | a W8A8, as loaded; activations INT8" in page
    )
    assert "| float32 | 123 | 8.25 | 3.2 |" in page
    assert "- b (not made): RuntimeError: a \\| b" in page and "- a: needs &lt;it>" in page
    assert "| Q8_0 | >= 0.001 [0.01, 0.5] |" in page and "| Q2_K | no file | | |" in page
    assert "- this environment: torch 2" in page and "- hqq: torch 3" in page


def test_names_are_folders_and_environments_exist(made: ModuleType) -> None:
    names = [one.name for one in made.FORMATS]
    assert len(set(names)) == len(names)
    assert all(one.environment is None or one.environment in made.ENVIRONMENTS for one in made.FORMATS)
    assert all(one.here or one.environment for one in made.FORMATS)
