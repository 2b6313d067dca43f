"""Calibration, from what the per-position table holds.

The usual diagram of a classifier needs the probability of the likeliest token at every position. The table does not
hold it: it has the probability of the actual token, and the entropy of the whole distribution. Each gives a test of its
own.

Entropy. If a model's distributions are right on average, its mean loss over any positions that are chosen by its own
distributions is their mean entropy: E[-log q(token)] = E[H(q)]. So positions are put in bins of the model's own
entropy, and the mean nll of each bin is held against its mean entropy. Below the diagonal the model is underconfident,
above it overconfident.

Probability. Positions are put in bins of the reference's probability of the actual token, and the candidate's mean
probability is held against the reference's. On the diagonal the candidate is as sure as the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Figure
from evalgate.errors import UsageError
from evalgate.metrics import Scores, Series, mean
from evalgate.stats.intervals import Sample
from evalgate.stats.units import Units

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Side = Literal["reference", "candidate"]

BINS = 12
PROBABILITY_EDGES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
_COLUMNS = {"reference": "ref", "candidate": "cand"}


@dataclass(frozen=True)
class CalibrationBin:
    """Positions whose stated value is in [low, high]. stated: its mean. actual: the mean of what it is held against."""

    low: float
    high: float
    stated: float
    actual: Figure


@dataclass(frozen=True)
class Calibration:
    """Bins in ascending order that hold a position; the intervals of `actual` hold together at `confidence`.

    side: whose calibration. stated, actual: what the axes are. gap: mean of actual minus stated over all positions,
    with an interval that holds at `confidence` by itself.
    """

    candidate: str
    side: Side
    stated: str
    actual: str
    unit: str
    confidence: float
    bins: tuple[CalibrationBin, ...]
    gap: Figure


def entropy_calibration(scores: Scores, side: Side, *, confidence: float = 0.95) -> Calibration:
    """What a model pays for the text (nll) against what it says it expects to pay (entropy), in nats.

    Bins hold equally many positions, up to 12; equal entropies share a bin.

    Raises:
        UsageError: the table does not hold both columns of that side as values.
        ScoreError: a bad value in a column that is needed.
    """
    stated, actual = _values(scores, f"{_COLUMNS[side]}_entropy"), _values(scores, f"{_COLUMNS[side]}_nll")
    edges = np.unique(np.quantile(stated, np.linspace(0, 1, BINS + 1)))
    return _calibration(
        scores,
        stated,
        actual,
        edges,
        side=side,
        named=("entropy", "nll"),
        unit="nats",
        support=(0.0, np.inf),
        confidence=confidence,
    )


def probability_calibration(scores: Scores, *, confidence: float = 0.95) -> Calibration:
    """The candidate's probability of the actual token against the reference's, in bins of the reference's.

    Raises:
        UsageError: the table does not hold the log-probabilities of both sides as values.
        ScoreError: a bad value in a column that is needed.
    """
    stated, actual = (np.minimum(np.exp(-_values(scores, f"{side}_nll")), 1.0) for side in ("ref", "cand"))
    return _calibration(
        scores,
        stated,
        actual,
        np.array(PROBABILITY_EDGES),
        side="candidate",
        named=("reference's probability of the actual token", "candidate's probability of the actual token"),
        unit="fraction",
        support=(0.0, 1.0),
        confidence=confidence,
    )


def _values(scores: Scores, column: str) -> Floats:
    if not scores.complete(column):
        raise UsageError(f"candidate {scores.candidate!r} has no {column} at every position: choose another plot")
    return scores.floats(column)


def _calibration(
    scores: Scores,
    stated: Floats,
    actual: Floats,
    edges: Floats,
    *,
    side: Side,
    named: tuple[str, str],
    unit: str,
    support: tuple[float, float],
    confidence: float,
) -> Calibration:
    """stated, actual: [n]. edges: ascending; a value on an edge is in the bin above it, on the last one in the last."""
    last = max(len(edges) - 2, 0)
    codes = np.clip(np.searchsorted(edges, stated, side="right") - 1, 0, last)
    order = np.argsort(codes, kind="stable")
    present, starts = np.unique(codes[order], return_index=True)
    parts = np.split(order, starts[1:])
    units = [Units.of(scores.document[rows], scores.window[rows]) for rows in parts]
    # Every bin that gets an interval takes its share of the error rate.
    each = 1 - (1 - confidence) / max(1, sum(bool(unit.codes) for unit in units))

    def figure(values: Floats, rows: Integers, level: float, reach: tuple[float, float]) -> Figure:
        sample = Sample(Series(values), scores.document[rows], windows=scores.window[rows], support=reach)
        return sample.figure(mean(), confidence=level)

    bins = [
        CalibrationBin(
            low=float(edges[code]),
            high=float(edges[min(code + 1, len(edges) - 1)]),
            stated=float(stated[rows].mean()),
            actual=figure(actual[rows], rows, each, support),
        )
        for code, rows in zip(present.tolist(), parts, strict=True)
    ]
    low, high = support
    return Calibration(
        candidate=scores.candidate,
        side=side,
        stated=named[0],
        actual=named[1],
        unit=unit,
        confidence=confidence,
        bins=tuple(bins),
        gap=figure(actual - stated, np.arange(len(scores)), confidence, (low - high, high - low)),
    )
