"""Every timed benchmark, one after the other, each in a process of its own: `make bench`.

    python -m benchmarks [NAME ...] [--size quick|full] [--runs N] [--out reports/bench] [--llama-perplexity PATH]

Each leaves OUT/NAME.json; OUT/README.md is written from all of them. One that fails, or takes longer than its limit, is
named, and its file says so; the others still run. One that this machine lacks something for is skipped, and what an
earlier run left of it stays. Exit code 1 where one failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import result
from benchmarks.result import SIZES, SKIPPED, Result
from benchmarks.timing import ROOT

# in the order of the table; seconds that each may take at quick sizes before it is ended
SUITE = {
    "pair_scoring": 600,
    "llama_perplexity": 900,
    "engine": 600,
    "continuations": 600,
    "growth": 400,
    "start": 400,
    "large_run": 400,
    "large_trace": 300,
    "report": 200,
}
BY_NAME = {
    "hidden": 900,
    "long_window": 900,
    "ray_workers": 900,
    "streaming": 900,
}  # of single features; run where named
LIMITS = {"tiny": 0.5, "quick": 1.0, "full": 8.0}  # times those seconds
OUT = ROOT / "reports" / "bench"
BASELINE = "baseline.json"
HEADER = """# Benchmarks

What `make bench` measured: figures of one machine, and ratios of things that were measured in turn within one run.
Other work on the machine moves figures by tens of percent and ratios by a few. `python -m benchmarks.NAME --help` says
what a benchmark compares; [Performance](../../docs/performance.md) says how to measure, and what bounds each.

"""


def main() -> int:
    options = _parser().parse_args()
    if options.llama_perplexity:
        os.environ["LLAMA_PERPLEXITY"] = options.llama_perplexity
    outcomes = {} if options.render else {name: run(name, options) for name in options.names or SUITE}
    path = options.out / "README.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(stored(options.out)), encoding="utf-8")
    print(f"\nwrote {path}")
    for name, outcome in outcomes.items():
        print(f"{name}: {outcome}")
    return 1 if any(outcome.startswith("failed") for outcome in outcomes.values()) else 0


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SUITE)}, or {', '.join(BY_NAME)}")
    made.add_argument("--size", choices=SIZES, default="quick", help="default: quick, about 20 minutes on two cores")
    made.add_argument("--runs", type=int, help="rounds of each, where not its own number")
    made.add_argument("--out", type=Path, default=OUT, help="folder of the results (default: reports/bench)")
    made.add_argument("--render", action="store_true", help="measure nothing: write README.md from the results")
    made.add_argument("--llama-perplexity", metavar="PATH", help="the program, or $LLAMA_PERPLEXITY")
    return made


def page(results: Sequence[Result]) -> str:
    """The README of a folder of results."""
    return HEADER + "\n".join(result.table(results) if results else ["Nothing is measured yet."]) + "\n"


def run(name: str, options: argparse.Namespace) -> str:
    """Run one benchmark and say how it ended; where it failed, its file says why."""
    limits = {**SUITE, **BY_NAME}
    if name not in limits:
        return f"failed: there is no such benchmark: choose from {', '.join(limits)}"
    path = options.out / f"{name}.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--size", options.size, "--json", str(path.resolve())]
    command += ["--runs", str(options.runs)] if options.runs else []
    print(f"\n== {name}", flush=True)
    before, began = _stamp(path), time.monotonic()
    code, said = _watched(command, limit=limits[name] * LIMITS[options.size])
    took = f"{time.monotonic() - began:.0f} s"
    if code == SKIPPED:
        return f"skipped: {said}"
    if code == 0 and _stamp(path) != before:
        return f"measured in {took}"
    why = "it left no result" if code == 0 else f"ended after {took}: {said}" if code < 0 else f"{said} (code {code})"
    result.write(Result(name=name, size=options.size, failed=why), path)
    return f"failed: {why}"


def _watched(command: Sequence[str], *, limit: float) -> tuple[int, str]:
    """Exit code, negative where the limit was reached, and the last line of its errors, which are shown too."""
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(command, cwd=ROOT, stderr=errors, start_new_session=True)
        try:
            code = child.wait(limit)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            _end(child)
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    sys.stderr.write(text[-8000:])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else "it said nothing"
    return (code, last) if code >= 0 else (-1, f"it took longer than its limit of {limit:.0f} s")


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a benchmark with the servers that it started."""
    try:
        os.killpg(child.pid, signal.SIGTERM if child.poll() is None else signal.SIGKILL)
    except ProcessLookupError:
        return
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _stamp(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else -1


def stored(folder: Path) -> list[Result]:
    """The results of a folder, in the order of the suite; raises ValueError naming a file that is not one."""
    found = [result.read(path) for path in sorted(folder.glob("*.json")) if path.name != BASELINE]
    order = [*SUITE, *BY_NAME]
    return sorted(found, key=lambda one: order.index(one.name) if one.name in order else len(order))


if __name__ == "__main__":
    sys.exit(main())
