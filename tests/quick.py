"""`make quick`: in about a minute the tests of what changed since main; where nothing did, the fast ones of every room.

Tests of a room are under its path in tests/ (evalgate/gate/judge.py: tests/evalgate/gate); tests/test_demo.py is extra.
Slow tests come last, and what has not begun after SECONDS is skipped and counted: `make test` runs everything. As a
script this file chooses and starts pytest; as its plugin (`-p tests.quick`) it orders and stops the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECONDS = 45
UNTIL = "EVALGATE_QUICK_UNTIL"  # seconds since the epoch
ALWAYS = ("tests/test_demo.py", "tests/test_layout.py")
ELSEWHERE = {  # rooms whose tests are not theirs
    "serve/llamacpp": "tests/evalgate/measure/test_endpoints_llamacpp.py",
    "serve/selftest": "tests/evalgate/doctor",
}
PAGES = (".md", ".ipynb", "Makefile", ".json", ".yaml", ".yml")


def changed() -> list[str]:
    """Paths that differ from where this branch left main, with what is not committed."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout

    base = git("merge-base", "main", "HEAD").strip() or "HEAD"
    names = git("diff", "--name-only", base) + git("ls-files", "--others", "--exclude-standard")
    return sorted(set(names.split("\n")) - {""})


def covering(path: str, root: Path = ROOT) -> str | None:
    """Where the tests of a file lie: a test file or a folder of them; None where none belong to it alone."""
    name = Path(path)
    if (room := "/".join(name.parts[:2])) in ELSEWHERE:
        return ELSEWHERE[room]
    if name.parts[0] == "tests":
        own = name.name.startswith("test_") and name.suffix == ".py" and (root / name).exists()
        found = name if own else name.parent
    elif name.parts[0] in ("evalgate", "serve"):
        single = Path("tests", name.parent, f"test_{name.stem}.py")
        found = single if len(name.parts) == 2 and (root / single).exists() else Path("tests", name.parent)
        while not (root / found).exists():
            found = found.parent
    elif name.parts[0] == "benchmarks":
        return "tests/benchmarks"
    elif path.startswith("docs/ci"):
        return "tests/test_ci_docs.py"
    else:
        return "tests/test_docs.py" if path.endswith(PAGES) else None
    return None if found == Path("tests") else str(found)


def main() -> int:
    """Choose the tests, say so, and run them. Returns pytest's exit code."""
    chosen = sorted({found for path in changed() if (found := covering(path))})
    print("quick:", ", ".join(chosen) or "nothing changed since main: the fast tests of every room", flush=True)
    command = [sys.executable, "-m", "pytest", "-p", "tests.quick", "-n", "2", "--dist", "worksteal"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, UNTIL: str(time.time() + SECONDS)}
    paths = list(dict.fromkeys([*ALWAYS, *(chosen or ["tests"])]))
    every = [] if chosen else ["-m", "not slow"]
    return subprocess.run([*command, *every, *paths], cwd=ROOT, env=environment, check=False).returncode


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The demo's own file first, slow tests last, other tests of the demo model not at all."""
    always = str(ROOT / ALWAYS[0])
    left = [item for item in items if item.get_closest_marker("demo") and str(item.path) != always]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in set(left)]
    items.sort(key=lambda item: (str(item.path) != always, item.get_closest_marker("slow") is not None))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what has not begun in time."""
    if time.time() > float(os.environ[UNTIL]):
        pytest.skip(f"not begun after {SECONDS} seconds: run `make test`")


if __name__ == "__main__":
    sys.exit(main())
