"""`make bench`: what it runs, and that one failing benchmark does not stop the others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as suite
from benchmarks import result

STAND_IN = """
import sys
from benchmarks import result
{body}
options = result.parser("a stand-in", runs=1).parse_args()
found = result.Result(name="{name}", size=options.size)
found.ratio("speed", [2.0], goal=1.0)
found.publish(options)
"""


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A suite of five: one that works, one that fails, one that hangs, one that lacks something, one that is mute."""
    bodies = {
        "works": "",
        "fails": "raise SystemExit('it broke: ' + 'a | b')",
        "hangs": "import time; time.sleep(600)",
        "lacks": "result.skip('no such program')",
        "mute": "raise SystemExit(0)",
    }
    package = tmp_path / "benchmarks"
    package.mkdir()
    for path in (suite.ROOT / "benchmarks").glob("*.py"):
        (package / path.name).symlink_to(path)
    for name, body in bodies.items():
        (package / f"{name}.py").write_text(STAND_IN.format(body=body, name=name))
    monkeypatch.setenv("PYTHONPATH", str(suite.ROOT))
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(suite, "SUITE", {name: 8 if name == "hangs" else 300 for name in bodies})
    return tmp_path / "out"


@pytest.mark.slow
def test_one_that_fails_is_named_and_the_others_run(
    stand_ins: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--out", str(stand_ins), "--size", "tiny"])
    assert suite.main() == 1
    out = capfd.readouterr().out
    assert "works: measured in" in out
    assert "fails: failed: it broke: a | b (code 1)" in out
    assert "hangs: failed: ended after" in out and "longer than its limit of 4 s" in out
    assert "lacks: skipped: not measured: no such program" in out
    assert "mute: failed: it left no result" in out
    assert not (stand_ins / "lacks.json").exists()
    assert result.read(stand_ins / "fails.json").failed == "it broke: a | b (code 1)"
    page = (stand_ins / "README.md").read_text()
    assert "| `works` | speed | **2.00** | 2.00 | at least 1.00: met | A |" in page
    assert r"| `fails` | failed: it broke: a \| b (code 1) |" in page


def test_a_name_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "nope", "--out", str(tmp_path)])
    assert suite.main() == 1
