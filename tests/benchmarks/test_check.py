"""The guard, on made-up results: nothing is timed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import check, result
from benchmarks.machine import describe
from benchmarks.result import Ratio, Result

HERE = describe()


def one(name: str = "pair_scoring", *, device: str | None = None, size: str = "quick", **ratios: float) -> Result:
    """A result with a ratio `speed`, of which more is better, and `cost`, of which less is."""
    found = Result(name=name, size=size, machine=HERE.model_copy(update={"device": device}))
    for ratio, value in {"speed": 2.0, "cost": 1.0, **ratios}.items():
        found.ratio(ratio, [value], better="lower" if ratio == "cost" else "higher")
    return found


class Folder:
    """Results on disk, and the guard run over them."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self._patch, self._capsys = path, monkeypatch, capsys

    def run(self, *results: Result, update: bool = False) -> tuple[int, str, str]:
        for old in self.path.glob("*.json"):
            if old.name != check.BASELINE:
                old.unlink()
        for found in results:
            result.write(found, self.path / f"{found.name}.json")
        words = ["check", "--results", str(self.path), *(["--update"] if update else [])]
        self._patch.setattr(sys, "argv", words)
        code = check.main()
        said = self._capsys.readouterr()
        return code, said.out, said.err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Folder:
    return Folder(tmp_path, monkeypatch, capsys)


def test_what_is_as_good_passes(folder: Folder) -> None:
    assert folder.run(one(), update=True)[0] == 0
    code, out, _ = folder.run(one(speed=1.71, cost=1.17))
    assert (code, out.splitlines()[-1]) == (0, "no ratio fell")
    assert folder.run(one(speed=9.0, cost=0.1))[0] == 0


def test_a_ratio_that_fell_is_named_with_both_values(folder: Folder) -> None:
    folder.run(one(), update=True)
    code, out, _ = folder.run(one(speed=1.5))
    assert code == 1
    expected = "pair_scoring: 'speed' fell from 2 to 1.5 (higher is better): 25% worse, 15% is allowed"
    assert expected in out.splitlines()


def test_a_cost_that_grew_is_worse(folder: Folder) -> None:
    folder.run(one(), update=True)
    code, out, _ = folder.run(one(cost=1.25))
    assert code == 1
    assert "'cost' grew from 1 to 1.25 (lower is better): 20% worse" in out
    assert "speed" not in out


def test_another_class_of_machine_or_size_is_not_compared(folder: Folder) -> None:
    folder.run(one(), update=True)
    for other in (one(device="a card", speed=0.1), one(size="full", speed=0.1)):
        code, out, _ = folder.run(other)
        assert code == 0
        assert f"pair_scoring is not compared: no baseline of {other.machine.kind} at {other.size} sizes" in out
    assert f"; there is one of {HERE.kind}" in folder.run(one(device="a card"))[1]


def test_each_class_has_its_own_baseline(folder: Folder) -> None:
    folder.run(one(), update=True)
    folder.run(one(device="a card", speed=8.0), update=True)
    assert folder.run(one(speed=2.0))[0] == 0
    assert folder.run(one(device="a card", speed=2.0))[0] == 1


def test_what_is_gone_is_worse(folder: Folder) -> None:
    """Else a benchmark that is dropped or broken would pass."""
    folder.run(one(extra=3.0), one("engine"), update=True)
    code, out, _ = folder.run(one())
    assert code == 1
    assert "pair_scoring: 'extra' was 3 and is not measured any more" in out
    assert "engine: no result on this class of machine" in out
    failed = Result(name="engine", size="quick", machine=HERE, failed="out of memory")
    code, out, _ = folder.run(one(extra=3.0), failed)
    assert (code, "engine: failed: out of memory" in out) == (1, True)


def test_a_new_ratio_is_noted(folder: Folder) -> None:
    folder.run(one(), update=True)
    code, out, _ = folder.run(one(extra=3.0))
    assert (code, "note: pair_scoring: 'extra' is new" in out) == (0, True)


def test_a_ratio_that_turned_round_is_not_compared_by_value(folder: Folder) -> None:
    folder.run(one(), update=True)
    turned = one()
    turned.ratios["speed"] = Ratio(value=2.0, runs=[2.0], better="lower")
    code, out, _ = folder.run(turned)
    assert (code, "'speed' is now better when lower" in out) == (1, True)


def test_a_failed_benchmark_is_not_kept(folder: Folder) -> None:
    code, _, err = folder.run(one(), Result(name="engine", size="quick", machine=HERE, failed="no"), update=True)
    assert (code, "engine failed" in err) == (1, True)
    assert not (folder.path / check.BASELINE).exists()


def test_files_that_cannot_be_read_are_named(folder: Folder) -> None:
    assert folder.run()[0] == 2
    (folder.path / check.BASELINE).write_text('{"classes": 1}')
    code, _, err = folder.run(one())
    assert (code, f"{check.BASELINE} is not a baseline: classes" in err) == (2, True)


def test_results_of_another_commit_are_noted(folder: Folder) -> None:
    old = one()
    old.machine = HERE.model_copy(update={"commit": "0123456789ab"})
    assert "measured at another commit" in folder.run(old)[1]


@pytest.mark.parametrize(("before", "now"), [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (-1.0, 1.0)])
def test_ratios_that_are_not_positive_are_worse_unless_equal(before: float, now: float) -> None:
    found = check.worsening(before, Ratio(value=now, runs=[now], better="higher"))
    assert (found > check.TOLERANCE) == (before != now)
