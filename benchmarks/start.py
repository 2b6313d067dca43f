"""How long a user waits before anything is measured: the command's own start, and the first result.

    python -m benchmarks.start [--size quick|full] [--runs 3] [--json FILE]

pass     `python -c pass`
help     `evalgate --help`
imports  `python -c "import torch, transformers"`, which every model that is loaded here waits for
one      `evalgate kl --ref demo --cand demo@int8 --limit 1 --context 32`, end to end
first    from the start of a process to the first scored window of the demo pair, of 512 tokens

All are processes of their own, in turn, after one round that does not count: what evalgate remembers between runs
(checks, tokenizers, compiled code) is there, as it is for a user's second run. `--size tiny` leaves out what loads
models.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time

from benchmarks import result, timing

ONE = ["kl", "--ref", "demo", "--cand", "demo@int8", "--limit", "1", "--context", "32", "--json"]


def main() -> None:
    options = _parser().parse_args()
    if options.side:
        print(first(options.began))
    else:
        measured(options).publish(options)


def _parser() -> argparse.ArgumentParser:
    made = result.parser(__doc__, runs=3)
    made.add_argument("--side", choices=("first",), help=argparse.SUPPRESS)
    made.add_argument("--began", type=float, help=argparse.SUPPRESS)
    return made


def measured(options: argparse.Namespace) -> result.Result:
    found = result.Result(name="start", size=options.size, settings={"rounds before": 1})
    sides = {
        "pass": lambda: _process([sys.executable, "-c", "pass"]),
        "help": lambda: _process([sys.executable, "-m", "evalgate", "--help"]),
    }
    if options.size != "tiny":
        sides["imports"] = lambda: _process([sys.executable, "-c", "import torch, transformers"])
        sides["one"] = lambda: _process([sys.executable, "-m", "evalgate", *ONE])
        sides["first"] = _to_first_window
    took = timing.interleaved(sides, options.runs, warm=0 if options.size == "tiny" else 1)
    found.figure("python -c pass", took["pass"], "s")
    found.figure("evalgate --help", took["help"], "s")
    found.ratio("evalgate --help over python -c pass", took["help"], took["pass"], better="lower")
    if options.size != "tiny":
        found.figure("import torch, transformers", took["imports"], "s")
        found.figure("evalgate kl --limit 1 --context 32, end to end", took["one"], "s", most=12)
        found.figure("first scored window of a second run", took["first"], "s", most=8)
        found.ratio("one short window over the imports", took["one"], took["imports"], better="lower")
        found.ratio("first window over the imports", took["first"], took["imports"], better="lower")
    return found


def _process(command: list[str]) -> float:
    with tempfile.TemporaryDirectory() as place:  # where a run's folder goes
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, cwd=place, check=False)
        seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} ended with code {done.returncode}: {done.stderr[-2000:]}")
    return seconds


def _to_first_window() -> float:
    # CLOCK_MONOTONIC is one clock for all processes, so that the child counts its own start too
    return float(timing.child("start", ["--side", "first", "--began", repr(time.monotonic())]))


class _FirstSeen(Exception):
    """Ends the measurement once a window is scored."""


class _Watch:
    """Notes when the first window is scored."""

    seconds = 0.0

    def __init__(self, began: float) -> None:
        self._began = began

    def stage(self, text: str) -> None: ...

    def start(self, *, windows: int, positions: int) -> None: ...

    def advance(self, *, windows: int, positions: int, running: dict[str, float]) -> None:
        self.seconds = time.monotonic() - self._began
        raise _FirstSeen

    def finish(self) -> None: ...


def first(began: float) -> float:
    """Seconds since `began` (time.monotonic) until the first window of the demo pair is scored."""
    import evalgate

    watch = _Watch(began)
    try:
        evalgate.compare("demo", "demo@int8", limit=8, resume=False, observer=watch)
    except _FirstSeen:
        return watch.seconds
    raise RuntimeError("no window was scored")


if __name__ == "__main__":
    main()
