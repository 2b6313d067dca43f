"""What benchmarks share: figures, ratios and their table, of made-up times."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import machine, result, timing
from benchmarks.result import Result


def made_up() -> Result:
    found = Result(name="made_up", size="tiny")
    found.figure("ours", [2.0, 1.0, 4.0], "s")
    found.figure("rows", 12345, "rows/s")
    found.ratio("ours to theirs", [4.0, 9.0, 1.0], [2.0, 3.0, 1.0], goal=1.5)
    found.ratio("growth", [2.5, 2.0], 1.0, better="lower", goal=2.0)
    return found


def test_a_ratio_is_the_median_of_its_rounds() -> None:
    """Not the ratio of medians: one slow round of both sides cancels out."""
    found = made_up()
    assert found.figures["ours"].value == 2.0
    assert found.ratios["ours to theirs"].runs == [2.0, 3.0, 1.0]
    assert found.ratios["ours to theirs"].value == 2.0
    assert found.ratios["ours to theirs"].met is True
    assert found.ratios["growth"].value == 2.25
    assert found.ratios["growth"].met is False


def test_rounds_of_different_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        made_up().ratio("odd", [1.0, 2.0], [1.0])


def test_a_name_is_used_once() -> None:
    with pytest.raises(ValueError, match="'ours to theirs' is there already"):
        made_up().ratio("ours to theirs", [1.0], [1.0])
    with pytest.raises(ValueError, match="'rows' is there already"):
        made_up().figure("rows", 1, "rows/s")


def test_a_result_is_written_and_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "made_up.json"
    found = made_up()
    found.publish(argparse.Namespace(json=str(path)))
    assert result.read(path) == found
    printed = capsys.readouterr().out
    assert "| `made_up` | ours | 2.00 s | 3: 1.00 to 4.00 | | A |" in printed
    assert "| `made_up` | ours to theirs | **2.00** | 3: 1.00 to 3.00 | at least 1.50: met | A |" in printed
    assert "at most 2.00: missed" in printed


@pytest.mark.parametrize(
    ("text", "wrong"),
    [("{", "JSON"), ("[]", "object"), ('{"name": "a"}', "size"), ('{"name": "a", "size": "huge"}', "size")],
)
def test_a_file_that_is_not_a_result_is_named(tmp_path: Path, text: str, wrong: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"a\.json is not a benchmark's result: .*{wrong}"):
        result.read(path)
    with pytest.raises(ValueError, match=r"b\.json cannot be read"):
        result.read(tmp_path / "b.json")


def test_one_table_names_each_machine_once_and_failures() -> None:
    first, second = made_up(), made_up()
    other = first.machine.model_copy(update={"device": "a card"})
    failed = Result(name="broken", size="quick", machine=other, failed="a | b\nc")
    lines = result.table([first, second, failed])
    assert sum(line.startswith("- A: ") for line in lines) == 1
    assert r"| `broken` | failed: a \| b c | | | | B |" in lines


def test_the_class_of_a_machine_names_its_device() -> None:
    plain = machine.describe()
    assert plain.kind == f"{plain.architecture}, {plain.vector}, {plain.cores} cores"
    assert machine.describe(device="a card").kind == f"{plain.kind}, a card"


def test_sides_run_in_turn_and_warm_rounds_do_not_count() -> None:
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = timing.interleaved({"a": lambda: side("a"), "b": lambda: side("b")}, 2, warm=1)
    assert order == ["a", "b"] * 3
    assert found == {"a": [3.0, 5.0], "b": [4.0, 6.0]}


def test_what_a_child_says_when_it_fails_is_kept() -> None:
    with pytest.raises(RuntimeError, match=r"benchmarks\.nowhere .* No module named benchmarks\.nowhere"):
        timing.child("nowhere", ["--size", "tiny"])
