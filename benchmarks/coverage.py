"""Coverage of every printed interval on corpora whose truth is known; prints the tables of docs/statistics.md.

Usage: python benchmarks/coverage.py [--runs 2000] [--jobs 2] [--only TABLE]

A cell says how often the truth lies in the 95 % interval, then how often above and below it, in percent. Percentiles
are drawn half as often; an open end counts as covering, and the cell then says how often an end was open.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.special import ndtri

from evalgate.metrics import Series, Statistic, mean
from evalgate.stats.intervals import Sample
from tests.evalgate.stats import populations as draw

GROUPS = (3, 5, 12, 24, 50, 200)
LENGTHS = ("equal", "lognormal")
LEVELS = (1, 5, 50, 90, 99, 99.9)
ROOT = Statistic("rms", scale="sqrt")
EXP = Statistic("ratio", scale="exp")


@dataclass
class Tally:
    """How often the truth was above, below and in an interval, and an end was open."""

    runs: int = 0
    above: int = 0
    below: int = 0
    open: int = 0

    def add(self, low: float | None, high: float | None, truth: float) -> None:
        """Count one interval; an open end holds everything."""
        self.runs += 1
        self.above += high is not None and truth > high
        self.below += low is not None and truth < low
        self.open += low is None or high is None

    def cell(self) -> str:
        """`95.2 (3.1, 1.7)`, with the share of open ends where there are any."""
        above, below, unbounded = (100 * n / self.runs for n in (self.above, self.below, self.open))
        text = f"{100 - above - below:.1f} ({above:.1f}, {below:.1f})"
        return text if not self.open else f"{text} {unbounded:.0f} open"


def means(sd: float) -> dict[str, tuple[Callable[[draw.Corpus], np.ndarray], Statistic, tuple[float, float], float]]:
    """Name -> values, statistic, range and truth of the means at one log s.d."""
    inf = math.inf
    return {
        "mean KL": (lambda c: c.kl(sd), mean(), (0.0, inf), 1.0),
        "mean delta-p": (lambda c: c.delta_prob(sd), mean(), (-inf, inf), 0.0),
        "RMS delta-p": (lambda c: c.delta_prob(sd) ** 2, ROOT, (-inf, inf), draw.DELTA * math.sqrt(1.09)),
        "perplexity ratio": (lambda c: c.log_ratio(sd), EXP, (-inf, inf), math.exp(draw.RATIO)),
    }


def tails() -> dict[str, tuple[Callable[[draw.Corpus], np.ndarray], Statistic, tuple[float, float], float]]:
    """The same for what does not depend on it."""
    inf = math.inf
    return {
        "mean, Pareto 3": (lambda c: c.pareto(3), mean(), (0.0, inf), 1.0),
        "mean, Pareto 2": (lambda c: c.pareto(2), mean(), (0.0, inf), 1.0),
        "mean, Pareto 1.5": (lambda c: c.pareto(1.5), mean(), (0.0, inf), 1.0),
        "same top-1, 0.97": (lambda c: c.agreement(0.97), mean(), (0.0, 1.0), 0.97),
        "same top-1, 0.999": (lambda c: c.agreement(0.999), mean(), (0.0, 1.0), 0.999),
    }


def mean_cells(kind: str, groups: int, runs: int) -> dict[str, Tally]:
    """Coverage of means and correlations."""
    rng = np.random.default_rng([groups, len(kind), 1])
    found: dict[str, Tally] = {}
    for _ in range(runs):
        corpus = draw.corpus(rng, groups, kind)
        wanted = {f"{name}, {sd}": one for sd in (0.5, 1.5) for name, one in means(sd).items()} | tails()
        for name, (values, statistic, support, truth) in wanted.items():
            figure = Sample(Series(values(corpus)), corpus.documents, support=support).figure(statistic)
            found.setdefault(name, Tally()).add(figure.low, figure.high, truth)
        reference = draw.reference_nll(rng, np.bincount(corpus.documents))
        for sd in (0.5, 1.5):
            candidate = Series(reference + corpus.log_ratio(sd))
            related = Sample(Series(reference), corpus.documents).correlation(candidate)
            if related is not None:
                tally = found.setdefault(f"correlation, {sd}", Tally())
                tally.add(related.low, related.high, draw.true_correlation(sd))
    return found


def percentile_cells(kind: str, groups: int, runs: int) -> dict[str, Tally]:
    """Coverage of percentiles, which the log s.d. does not change."""
    rng = np.random.default_rng([groups, len(kind), 2])
    found: dict[str, Tally] = {}
    for _ in range(runs // 2):
        corpus = draw.corpus(rng, groups, kind)
        sample = Sample(Series(corpus.latent), corpus.documents)
        for level in LEVELS:
            figure = sample.figure(Statistic("p", "percentile", level=level))
            found.setdefault(f"p{level:g}", Tally()).add(figure.low, figure.high, float(ndtri(level / 100)))
    return found


def slice_cells(kind: str, groups: int, runs: int) -> dict[str, Tally]:
    """How often the intervals of four parts with `groups` documents each hold together."""
    rng = np.random.default_rng([groups, len(kind), 3])
    found: dict[str, Tally] = {}
    for _ in range(runs):
        parts = [draw.corpus(rng, groups, kind) for _ in range(4)]
        for name, values, support, truth in (
            ("mean KL, 1.5", lambda c: c.kl(1.5), (0.0, math.inf), 1.0),
            ("same top-1, 0.97", lambda c: c.agreement(0.97), (0.0, 1.0), 0.97),
            ("same top-1, 0.999", lambda c: c.agreement(0.999), (0.0, 1.0), 0.999),
        ):
            figures = [
                Sample(Series(values(c)), c.documents, support=support).figure(mean(), confidence=1 - 0.05 / 4)
                for c in parts
            ]
            tally = found.setdefault(name, Tally())
            tally.runs += 1
            tally.above += any(f.high is not None and truth > f.high for f in figures)
            tally.below += any(f.low is not None and truth < f.low for f in figures) and not any(
                f.high is not None and truth > f.high for f in figures
            )
    return found


def text_cells(between: str, windows: int, runs: int) -> dict[str, Tally]:
    """Coverage of the interval within one text, for windows whose effects hang together."""
    rng = np.random.default_rng([windows, len(between), 4])
    found: dict[str, Tally] = {"mean KL, 1.5": Tally()}
    for _ in range(runs):
        values = draw.one_text(rng, windows, between)
        codes = np.repeat(np.arange(windows), values.shape[1])
        sample = Sample(Series(values.ravel()), np.zeros(values.size, dtype=np.int64), windows=codes)
        figure = sample.figure(mean())
        found["mean KL, 1.5"].add(figure.low, figure.high, 1.0)
    return found


def table(title: str, columns: Sequence[object], cells: Iterable[dict[str, Tally]]) -> str:
    """A Markdown table with one row per statistic."""
    found = list(cells)
    rows = [[name, *(cell[name].cell() if name in cell else "" for cell in found)] for name in found[-1]]
    lines = [["", *map(str, columns)], ["---"] * (len(columns) + 1), *rows]
    return f"\n{title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Draw, count, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", choices=("means", "percentiles", "slices", "text"))
    asked = parser.parse_args()
    kinds = {"means": mean_cells, "percentiles": percentile_cells}
    with ProcessPoolExecutor(asked.jobs) as pool:
        for name, cells in kinds.items():
            for kind in LENGTHS if asked.only in (None, name) else ():
                found = pool.map(partial(cells, kind, runs=asked.runs), GROUPS)
                print(table(f"{name.capitalize()}, documents of {kind} length:", GROUPS, found), flush=True)
        if asked.only in (None, "slices"):
            for kind in LENGTHS:
                found = pool.map(partial(slice_cells, kind, runs=asked.runs), (5, 10, 25))
                print(
                    table(f"Four slices at once, documents of {kind} length in each:", (5, 10, 25), found), flush=True
                )
        if asked.only in (None, "text"):
            for between in ("0.5", "0.8", "long"):
                found = pool.map(partial(text_cells, between, runs=asked.runs), (60, 120, 300))
                print(table(f"One text, windows that hang together by {between}:", (60, 120, 300), found), flush=True)


if __name__ == "__main__":
    main()
