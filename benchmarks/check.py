"""The guard: whether a ratio fell since the baseline was kept. `make bench bench-check` measures and compares.

    python -m benchmarks.check [--results reports/bench] [--baseline FILE] [--update]

The baseline (reports/bench/baseline.json) keeps ratios by class of machine (architecture, vector instructions, cores,
accelerator) and by size. A ratio is compared only with one of its own class and size; where there is none, it says so.
It may get worse by 15 %: fall, or grow where lower is better. Figures are not compared.

Exit code: 0 nothing fell; 1 a ratio fell, is missing, or a benchmark failed; 2 a file cannot be read. --update keeps
the results as the new baseline of their class and size, and leaves others alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ValidationError

from benchmarks.__main__ import BASELINE, OUT, stored
from benchmarks.machine import commit
from benchmarks.result import Better, Ratio, Result

TOLERANCE = 0.15


class Kept(BaseModel, extra="forbid", frozen=True):
    """A ratio of the baseline."""

    value: float
    better: Better


class Entry(BaseModel, extra="forbid"):
    """One benchmark's ratios, and when and where they were measured."""

    commit: str
    created: str
    ratios: dict[str, Kept]


class Baseline(BaseModel, extra="forbid"):
    """Ratios by class of machine, size and benchmark."""

    classes: dict[str, dict[str, dict[str, Entry]]] = {}

    def entries(self, kind: str, size: str) -> dict[str, Entry]:
        """What is kept of a class of machine at a size, by benchmark."""
        return self.classes.get(kind, {}).get(size, {})


class Compared(NamedTuple):
    """Sentences: what is worse, and what a reader should know."""

    worse: list[str]
    notes: list[str]


def main() -> int:
    options = _parser().parse_args()
    path = options.baseline or options.results / BASELINE
    try:
        results = stored(options.results)
        baseline = read_baseline(path)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if not results:
        sys.stderr.write(f"{options.results} holds no results: run make bench\n")
        return 2
    if options.update:
        return _update(baseline, results, path)
    found = compare(baseline, results)
    for note in [*found.notes, *_stale(results)]:
        print(f"note: {note}")
    for line in found.worse:
        print(line)
    print(f"{len(found.worse)} worse than the baseline" if found.worse else "no ratio fell")
    return 1 if found.worse else 0


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--results", type=Path, default=OUT, help="folder of the results (default: reports/bench)")
    made.add_argument("--baseline", type=Path, help=f"default: {BASELINE} among the results")
    made.add_argument("--update", action="store_true", help="keep these results as the baseline")
    return made


def read_baseline(path: Path) -> Baseline:
    """The baseline of a file, an empty one where there is none; raises ValueError that names what is wrong."""
    if not path.exists():
        return Baseline()
    try:
        return Baseline.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ValueError(f"{path} is not a baseline: {place}: {first['msg']}") from error


def compare(baseline: Baseline, results: Sequence[Result]) -> Compared:
    """What of the results is worse than the baseline of their class of machine and size."""
    found = Compared([], [])
    for one in results:
        if one.failed is not None:
            found.worse.append(f"{one.name}: failed: {one.failed}")
            continue
        entry = baseline.entries(one.machine.kind, one.size).get(one.name)
        if entry is None:
            known = ", ".join(sorted(k for k in baseline.classes if one.name in baseline.entries(k, one.size)))
            others = f"; there is one of {known}" if known else ""
            found.notes.append(
                f"{one.name} is not compared: no baseline of {one.machine.kind} at {one.size} sizes{others}"
            )
            continue
        found.worse.extend(_fallen(one, entry))
        new = sorted(set(one.ratios) - set(entry.ratios))
        found.notes.extend(f"{one.name}: {name!r} is new, and compared after --update" for name in new)
    seen = {(one.machine.kind, one.size) for one in results}
    have = {(one.machine.kind, one.size, one.name) for one in results}
    for kind, size in sorted(seen):
        gone = [name for name in baseline.entries(kind, size) if (kind, size, name) not in have]
        found.worse.extend(
            f"{name}: no result on this class of machine ({kind}, {size} sizes): run python -m benchmarks {name}"
            for name in gone
        )
    return found


def _fallen(one: Result, entry: Entry) -> list[str]:
    found = []
    for name, kept in entry.ratios.items():
        now = one.ratios.get(name)
        if now is None:
            found.append(f"{one.name}: {name!r} was {kept.value:.3g} and is not measured any more")
        elif now.better != kept.better:
            found.append(f"{one.name}: {name!r} is now better when {now.better}: keep it anew with --update")
        elif (share := worsening(kept.value, now)) > TOLERANCE:
            way = "fell" if kept.better == "higher" else "grew"
            found.append(
                f"{one.name}: {name!r} {way} from {kept.value:.3g} to {now.value:.3g} ({now.better} is better): "
                f"{share:.0%} worse, {TOLERANCE:.0%} is allowed"
            )
    return found


def worsening(before: float, now: Ratio) -> float:
    """By what share a ratio got worse; negative where it got better. 0.5 is half as good, either way round."""
    if before <= 0 or now.value <= 0:
        return 0.0 if before == now.value else 1.0
    return 1 - (now.value / before if now.better == "higher" else before / now.value)


def _stale(results: Sequence[Result]) -> list[str]:
    head = commit().rstrip("+")
    old = [f"{one.name} ({one.machine.commit})" for one in results if one.machine.commit.rstrip("+") != head]
    return [f"measured at another commit than {head}: {', '.join(old)}"] if old else []


def _update(baseline: Baseline, results: Sequence[Result], path: Path) -> int:
    failed = [one.name for one in results if one.failed is not None]
    if failed:
        sys.stderr.write(f"nothing is kept, since {', '.join(failed)} failed: run them again\n")
        return 1
    for one in results:
        entry = Entry(
            commit=one.machine.commit,
            created=one.created,
            ratios={name: Kept(value=ratio.value, better=ratio.better) for name, ratio in one.ratios.items()},
        )
        baseline.classes.setdefault(one.machine.kind, {}).setdefault(one.size, {})[one.name] = entry
        print(f"kept {len(entry.ratios)} ratios of {one.name} for {one.machine.kind}, {one.size} sizes")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(baseline.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
