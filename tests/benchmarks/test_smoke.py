"""Every timed benchmark runs at its tiniest size; what it takes does not matter."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as suite
from benchmarks import growth, large_run, large_trace, result, start, timing
from benchmarks.result import Result

ROOT = suite.ROOT
PAGE = ROOT / "docs" / "performance.md"
SHARED = {"machine", "timing", "result", "check", "__main__"}


def tiny(module: object) -> Result:
    parser = getattr(module, "_parser", lambda: result.parser(""))()
    return module.measured(parser.parse_args(["--size", "tiny", "--runs", "1"]))  # type: ignore[attr-defined]


def in_process(name: str, arguments: list[str]) -> dict[str, float]:
    """`timing.child` without the seconds that a process takes to import what this one has."""
    module = {"large_run": large_run, "large_trace": large_trace}[name]
    options = module._parser().parse_args(arguments)
    if name == "large_trace":
        return {"write": module.write, "read": module.read, "verify": module.verified}[options.side](options)
    write = options.side == "write"
    return module.write(options.positions, Path(options.folder)) if write else module.sum_up(Path(options.folder))


@pytest.mark.slow
def test_growth() -> None:
    found = tiny(growth)
    assert {f"time at 4 times the {name}" for name in growth.GOALS} == set(found.ratios)


def test_a_large_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "child", in_process)
    found = tiny(large_run)
    assert 20 < found.figures["bytes a position on disk"].value < 200
    assert "time for twice the positions" in found.ratios


def test_a_large_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "child", in_process)
    found = tiny(large_trace)
    assert 100 < found.figures["bytes a position on disk"].value < 700
    assert "verify over read" in found.ratios


def test_the_start() -> None:
    found = tiny(start)
    assert found.ratios["evalgate --help over python -c pass"].value > 1


def test_the_fabricated_run_is_a_possible_one() -> None:
    from evalgate.metrics import check_table

    whole = large_run.fabricated(6_000)
    check_table(whole)
    assert whole.num_rows == 6_000
    assert len(whole.column("document").unique()) >= 3


def test_the_suite_is_every_benchmark_that_gives_a_result() -> None:
    giving = {
        path.stem
        for path in (ROOT / "benchmarks").glob("*.py")
        if path.stem not in SHARED and "result.parser(" in path.read_text(encoding="utf-8")
    }
    assert giving <= {*suite.SUITE, *suite.BY_NAME, "gpu"}
    assert all((ROOT / "benchmarks" / f"{name}.py").exists() for name in (*suite.SUITE, *suite.BY_NAME))


@pytest.mark.slow
def test_every_benchmark_says_what_it_does() -> None:
    """All at once: most of the time is that of imports."""
    names = sorted(p.stem for p in (ROOT / "benchmarks").glob("*.py") if p.stem not in {"machine", "timing", "result"})
    lines = [
        "import runpy, sys, contextlib, io",
        f"for name in {names!r}:",
        "    sys.argv, out = [name, '--help'], io.StringIO()",
        "    try:",
        "        with contextlib.redirect_stdout(out):",
        "            runpy.run_module(f'benchmarks.{name}', run_name='__main__', alter_sys=False)",
        "    except SystemExit as end:",
        "        assert not end.code, (name, end.code)",
        "    assert 'usage:' in out.getvalue(), name",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_published_table_is_made_of_the_published_results() -> None:
    published = (suite.OUT / "README.md").read_text(encoding="utf-8")
    assert published == suite.page(suite.stored(suite.OUT)), "run .venv/bin/python -m benchmarks --render"


def test_benchmarks_that_pages_name_exist_and_the_page_names_all() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("reports/*.md")]
    named = {
        (page.name, found)
        for page in pages
        for found in re.findall(r"benchmarks[./](\w+)", page.read_text(encoding="utf-8"))
        if found not in {"py", "NAME"}
    }
    missing = sorted(f"{page}: {name}" for page, name in named if not (ROOT / "benchmarks" / f"{name}.py").exists())
    assert not missing
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in (*suite.SUITE, *suite.BY_NAME) if f"`{name}`" not in text] == []
