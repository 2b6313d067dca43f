"""The first comparison of the README in small: the demo model against its int8 copy, from text to verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

import evalgate
from evalgate.cli.app import invoke
from evalgate.store.runs import read_run
from tests.evalgate.cli.test_cli import MemoryOutput

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the demo model against itself in int8, on two short windows."""
    place = tmp_path_factory.mktemp("demo")
    evalgate.compare("demo", "demo@int8", context=24, limit=2, out=place / "run", resume=False)
    return place / "run"


def test_int8_is_near_but_not_the_same(folder: Path) -> None:
    metrics = read_run(folder).summary.comparisons[0].overall.metrics
    assert 1e-4 < metrics["kl"].statistics["mean"].value < 0.1
    assert metrics["top1_agreement"].statistics["mean"].value > 0.8
    assert 1 < metrics["perplexity"].statistics["reference"].value < 1000


def test_the_stored_run_is_shown_and_judged(folder: Path, tmp_path: Path) -> None:
    output = MemoryOutput()
    assert invoke(["show", str(folder)], output) == 0
    assert "Mean KLD" in output.text
    (tmp_path / "strict.toml").write_text('[[rules]]\nmetric = "top1_agreement"\nmin = 0.999999\n')
    assert invoke(["gate", "--policy", str(tmp_path / "strict.toml"), "--run", str(folder)], MemoryOutput()) in (1, 3)
