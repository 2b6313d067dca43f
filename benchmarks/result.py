"""What a timed benchmark says: figures and ratios, as JSON and as a table.

    options = result.parser(__doc__).parse_args()
    found = result.Result(name="pair_scoring", size=options.size)
    times = timing.interleaved({"script": script, "ours": ours}, options.runs or 5)
    found.figure("ours", positions / median(times["ours"]), "positions/s")
    found.ratio("ours to the script", times["script"], times["ours"], goal=1.5)
    found.publish(options)

A ratio is the median of the ratios of rounds, so that what slows both sides of a round down cancels out. It is what the
guard compares (`python -m benchmarks.check`); figures depend on the machine and are only shown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Literal, NoReturn

from pydantic import BaseModel, Field, ValidationError

from benchmarks.machine import Machine, describe

SIZES = ("tiny", "quick", "full")  # of the smoke test; of `make bench`; of figures that are quoted
SKIPPED = 77  # exit code: this machine lacks what the benchmark needs
Size = Literal["tiny", "quick", "full"]
Better = Literal["higher", "lower"]


class Figure(BaseModel, extra="forbid", frozen=True):
    """A number with its unit, as this machine gave it; runs: what it is the median of, or empty. most: the goal."""

    value: float
    unit: str
    runs: list[float] = []
    most: float | None = None


class Ratio(BaseModel, extra="forbid", frozen=True):
    """A number without a unit that other machines of the same class should give too; runs: one a round."""

    value: float
    runs: list[float] = Field(min_length=1)
    better: Better
    goal: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None where there is none."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.better == "higher" else self.value <= self.goal


class Result(BaseModel, extra="forbid"):
    """One benchmark's figures and ratios. settings: its sizes, in words. failed: why there are none.

    What ran on an accelerator is given `machine=describe(device=NAME)`.
    """

    name: str
    size: Size
    machine: Machine = Field(default_factory=describe)
    created: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    settings: dict[str, str | int | float | bool | None] = {}
    figures: dict[str, Figure] = {}
    ratios: dict[str, Ratio] = {}
    notes: list[str] = []
    failed: str | None = None

    def figure(self, name: str, value: float | Sequence[float], unit: str, *, most: float | None = None) -> float:
        """Keep a figure, or the median of several runs of it; returns it. most: what it should not exceed."""
        if name in self.figures:
            raise ValueError(f"the figure {name!r} is there already")
        runs = [float(run) for run in value] if isinstance(value, Sequence) else []
        single = median(runs) if isinstance(value, Sequence) else float(value)
        self.figures[name] = Figure(value=single, unit=unit, runs=runs, most=most)
        return single

    def ratio(
        self,
        name: str,
        top: Sequence[float],
        bottom: Sequence[float] | float = 1.0,
        *,
        better: Better = "higher",
        goal: float | None = None,
    ) -> float:
        """Keep top / bottom, round by round, and its median; returns it.

        bottom: as many rounds as `top`, or one number for all.
        """
        if name in self.ratios:
            raise ValueError(f"the ratio {name!r} is there already")
        under = [bottom] * len(top) if isinstance(bottom, int | float) else bottom
        runs = [a / b for a, b in zip(top, under, strict=True)]
        self.ratios[name] = Ratio(value=median(runs), runs=runs, better=better, goal=goal)
        return self.ratios[name].value

    def publish(self, options: argparse.Namespace) -> None:
        """Print the table, and write JSON where `--json` asks for it."""
        self.machine = describe(device=self.machine.device)  # torch, imported by now, names its kernels and threads
        print("\n".join(table([self])))
        if options.json:
            write(self, Path(options.json))


def parser(doc: str, *, runs: int = 5) -> argparse.ArgumentParser:
    """The options that every timed benchmark takes. doc: of its module; runs: rounds, where the user names none."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--size", choices=SIZES, default="quick", help="tiny only shows that it runs (default: quick)")
    made.add_argument("--runs", type=_count, default=runs, help=f"rounds; ratios are their median (default: {runs})")
    made.add_argument("--json", metavar="FILE", help="write figures, ratios and the machine there")
    return made


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def skip(reason: str) -> NoReturn:
    """End a benchmark that this machine lacks something for: `make bench` says why and goes on."""
    sys.stderr.write(f"not measured: {reason}\n")
    raise SystemExit(SKIPPED)


def write(result: Result, path: Path) -> None:
    """Write a result as JSON, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> Result:
    """A result that was written; raises ValueError that names the file and what is wrong with it."""
    try:
        return Result.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ValueError(f"{path} is not a benchmark's result: {place}: {first['msg']}") from error


def table(results: Iterable[Result]) -> list[str]:
    """Lines of Markdown: one table of all figures and ratios, and under it the machines that its letters name."""
    lines = ["| benchmark | figure or ratio | value | rounds | goal | machine |", "|---|---|---|---|---|---|"]
    machines: dict[str, str] = {}
    notes: list[str] = []
    for result in results:
        where = f"{result.machine}, commit {result.machine.commit}, {result.size} sizes"
        letter = machines.setdefault(where, _letter(len(machines)))
        name = f"`{result.name}`"
        if result.failed is not None:
            lines.append(_row(name, f"failed: {_cell(result.failed)}", "", "", "", letter))
        for title, figure in result.figures.items():
            shown = f"{_number(figure.value)} {_cell(figure.unit)}".rstrip()
            goal = "" if figure.most is None else _held("at most", figure.most, figure.value <= figure.most)
            lines.append(_row(name, _cell(title), shown, _spread(figure.runs), goal, letter))
        for title, ratio in result.ratios.items():
            value = f"**{_number(ratio.value)}**"
            lines.append(_row(name, _cell(title), value, _spread(ratio.runs), _goal(ratio), letter))
        notes += [f"- {name}: {note}" for note in result.notes]
    lines += ["", *(f"- {letter}: {where}" for where, letter in machines.items()), *notes]
    return lines


def _row(*cells: str) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else f"M{number + 1}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:300]


def _number(value: float) -> str:
    if value and (abs(value) < 0.001 or abs(value) >= 1e7):
        return f"{value:.2e}"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def _spread(runs: Sequence[float]) -> str:
    if not runs:
        return ""
    return _number(runs[0]) if len(runs) == 1 else f"{len(runs)}: {_number(min(runs))} to {_number(max(runs))}"


def _goal(ratio: Ratio) -> str:
    if ratio.goal is None:
        return "higher is better" if ratio.better == "higher" else "lower is better"
    return _held("at least" if ratio.better == "higher" else "at most", ratio.goal, bool(ratio.met))


def _held(words: str, goal: float, met: bool) -> str:
    return f"{words} {_number(goal)}: {'met' if met else 'missed'}"
