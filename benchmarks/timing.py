"""How a benchmark measures: sides in turn, so that what the machine does besides falls on all of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from math import log
from pathlib import Path
from statistics import linear_regression
from typing import Any, TypeVar

ROOT = Path(__file__).parents[1]
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


T = TypeVar("T")


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock seconds that `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def interleaved(sides: Mapping[str, Callable[[], float]], runs: int, *, warm: int = 0) -> dict[str, list[float]]:
    """What each side gave (mostly seconds), `runs` times, in turn: A B A B. warm: rounds before, which do not count."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(warm + runs):
        for name, side in sides.items():
            value = side()
            if number >= warm:
                found[name].append(value)
    return found


def memory_over(work: Callable[[], T]) -> tuple[T, float]:
    """What `work` gave, and how much more memory it had at its peak than before, in MiB (Linux)."""
    before = _memory("VmRSS")
    _CLEAR.write_text("5")  # the peak starts again from here
    value = work()
    return value, _memory("VmHWM") - before


def peak_memory(work: Callable[[], T]) -> tuple[T, float]:
    """What `work` gave, and the most that the process had resident meanwhile, in MiB (Linux)."""
    _CLEAR.write_text("5")
    value = work()
    return value, _memory("VmHWM")


def exponent(seconds_at: Mapping[int, float]) -> float:
    """The b of seconds = a * size^b, by least squares of the logarithms. Sizes and seconds: above 0, at least two."""
    sizes, taken = [log(size) for size in seconds_at], [log(value) for value in seconds_at.values()]
    return linear_regression(sizes, taken).slope


def _memory(key: str) -> float:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def child(name: str, arguments: Sequence[str]) -> Any:
    """What `python -m benchmarks.NAME ARGUMENTS` printed as JSON on its last line, in a process of its own.

    As a module: a script's own folder comes first on the path, and numba would take coverage.py there for the package.
    Raises RuntimeError with the end of its errors where it fails.
    """
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} ended with code {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
