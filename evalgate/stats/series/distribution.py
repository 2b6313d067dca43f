"""How the values of a metric are distributed, in bins that are equally wide on a logarithmic axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Exactness
from evalgate.metrics import Scores
from evalgate.stats.series.known import known_series

Floats = NDArray[np.float64]

PER_DECADE = 5
LEAST = 1e-9  # values at or below it share one count: what float32 leaves of two equal distributions
LEAST_DELTA = 1e-4  # |delta p| up to it is the middle bin


@dataclass(frozen=True)
class Bin:
    """Values in [low, high). share: of all values. mass: of the sum of all values, None where that sum is not positive
    or values have both signs."""

    low: float
    high: float
    count: int
    share: float
    mass: float | None = None


@dataclass(frozen=True)
class Distribution:
    """Adjacent bins in ascending order, from the first to the last that holds a value.

    scale: "log", or "signed log" where a middle bin around 0 divides negative from positive bins. n: all values. below:
    how many lie at or below the first edge that a log axis has (LEAST): 0, or a negative estimate; none of a signed
    axis. series: `value`, or `low` or `high` where only bounds are known. largest: the largest value. half: the least
    share of values that hold half of the sum, None where values are negative or all 0.
    """

    candidate: str
    metric: str
    unit: str
    series: str
    exactness: Exactness
    scale: Literal["log", "signed log"]
    bins: tuple[Bin, ...]
    n: int
    below: int
    largest: float
    half: float | None = None


def distribution(scores: Scores, metric: str = "kl", *, series: str | None = None) -> Distribution:
    """The distribution of a metric's values, 5 bins a decade.

    series: None = the primary one, or the lower bounds where only bounds are known (`known_series`).

    Raises:
        UsageError: the candidate has no scores for the metric, or no such series.
        ScoreError: a bad value in a column that is needed.
    """
    known = known_series(scores, metric, series)
    one = known.series
    values = one.values if one.sizes is None else one.values / np.maximum(one.sizes, 1)
    above = values > LEAST
    return Distribution(
        candidate=scores.candidate,
        metric=metric,
        unit=known.metric.unit,
        series=known.name,
        exactness=known.exactness,
        scale="log",
        bins=_log_bins(values[above], len(values), total=float(values.sum())),
        n=len(values),
        below=int(len(values) - np.count_nonzero(above)),
        largest=float(values.max()),
        half=_half(values),
    )


def delta_p_distribution(scores: Scores) -> Distribution:
    """The distribution of q(actual) - p(actual), the change of the actual token's probability.

    Raises:
        UsageError: the candidate's or the reference's log-probabilities are not known as values.
        ScoreError: a bad value in a column that is needed.
    """
    known = known_series(scores, "delta_prob")
    values = known.series.values
    decades = round(-np.log10(LEAST_DELTA))
    outward = np.logspace(-decades, 0, decades * PER_DECADE + 1)
    edges = np.concatenate([-outward[::-1], outward])
    # Rounding in float32 may leave a probability a hair above 1, and so a change a hair beyond an end.
    codes = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    counts = np.bincount(codes, minlength=len(edges) - 1)
    return Distribution(
        candidate=scores.candidate,
        metric="delta_prob",
        unit=known.metric.unit,
        series=known.name,
        exactness=known.exactness,
        scale="signed log",
        bins=_trimmed([Bin(float(a), float(b), int(c), float(c) / len(values)) for a, b, c in _edged(edges, counts)]),
        n=len(values),
        below=0,
        largest=float(values.max()),
    )


def _half(values: Floats) -> float | None:
    total = float(values.sum())
    if total <= 0 or values.min() < 0:
        return None
    held = np.cumsum(np.sort(values)[::-1])
    return float(np.searchsorted(held, total / 2) + 1) / len(values)


def _log_bins(values: Floats, n: int, *, total: float) -> tuple[Bin, ...]:
    """Bins of values > LEAST, out of n that sum to `total`."""
    if not len(values):
        return ()
    # The edges are powers of 10 ** (1 / PER_DECADE); values are compared with the edges themselves, so that one that
    # lies on an edge is counted where the bin says.
    first = int(np.floor(np.log10(values.min()) * PER_DECADE + 1e-9))
    last = int(np.floor(np.log10(values.max()) * PER_DECADE + 1e-9)) + 1
    edges = 10 ** (np.arange(first, last + 1) / PER_DECADE)
    codes = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    counts = np.bincount(codes, minlength=len(edges) - 1)
    sums = np.bincount(codes, weights=values, minlength=len(edges) - 1)
    return tuple(
        Bin(float(a), float(b), int(c), float(c) / n, float(s) / total if total > 0 else None)
        for (a, b, c), s in zip(_edged(edges, counts), sums, strict=True)
    )


def _edged(edges: Floats, counts: NDArray[np.int64]) -> list[tuple[float, float, int]]:
    return list(zip(edges[:-1], edges[1:], counts, strict=True))


def _trimmed(bins: list[Bin]) -> tuple[Bin, ...]:
    filled = [place for place, one in enumerate(bins) if one.count]
    return tuple(bins[filled[0] : filled[-1] + 1]) if filled else ()
