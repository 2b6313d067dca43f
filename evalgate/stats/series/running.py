"""A metric's mean and its interval as documents arrive, in the order in which they were measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Exactness, Figure
from evalgate.metrics import Scores, mean
from evalgate.stats.intervals import Sample
from evalgate.stats.series.known import known_series

Integers = NDArray[np.int64]

MOST_POINTS = 40


@dataclass(frozen=True)
class RunningPoint:
    """The figure after so many arrivals; its `n` counts values, its `documents` what they come from."""

    arrived: int
    figure: Figure


@dataclass(frozen=True)
class Running:
    """Points in order, the last one over everything. per: what arrives; windows where there is one document only.

    Each interval holds at its own point, for a size that was fixed before. That they hold at all points at once, or at
    a point that was chosen for how it looks, is not claimed.
    """

    candidate: str
    metric: str
    unit: str
    series: str
    exactness: Exactness
    per: Literal["documents", "windows"]
    points: tuple[RunningPoint, ...]


def running(
    scores: Scores,
    metric: str = "kl",
    *,
    series: str | None = None,
    confidence: float = 0.95,
    points: int = MOST_POINTS,
) -> Running:
    """The running mean at up to `points` counts of documents, evenly spaced on a logarithmic axis.

    series: None = the primary one, or the lower bounds where only bounds are known (`known_series`).

    Raises:
        UsageError: the candidate has no scores for the metric, or no such series.
        ScoreError: a bad value in a column that is needed.
    """
    known = known_series(scores, metric, series)
    whole = known.sample()
    assert whole.windows is not None
    single = len(np.unique(whole.documents)) == 1
    arrivals = np.unique(whole.windows, return_inverse=True)[1] if single else _by_arrival(whole.documents)
    order = np.argsort(arrivals, kind="stable")
    counts = np.cumsum(np.bincount(arrivals))
    values, documents, windows = whole.series.at(order), whole.documents[order], whole.windows[order]
    if known.series.rows is not None:
        values = type(values)(values.values, sizes=values.sizes, se=values.se, low=values.low)
    found = []
    for arrived in _checkpoints(len(counts), points):
        rows = np.arange(int(counts[arrived - 1]))
        part = Sample(
            values.at(rows),
            documents[rows],
            windows=windows[rows],
            support=whole.support,
            exactness=known.exactness,
        )
        found.append(RunningPoint(arrived, part.figure(mean(), confidence=confidence)))
    return Running(
        candidate=scores.candidate,
        metric=metric,
        unit=known.metric.unit,
        series=known.name,
        exactness=known.exactness,
        per="windows" if single else "documents",
        points=tuple(found),
    )


def _by_arrival(documents: Integers) -> Integers:
    """Codes [n] numbered by first appearance, without gaps."""
    present, first, inverse = np.unique(documents, return_index=True, return_inverse=True)
    rank = np.empty(len(present), np.int64)
    rank[np.argsort(first)] = np.arange(len(present))
    return np.asarray(rank[inverse], dtype=np.int64)


def _checkpoints(total: int, most: int) -> list[int]:
    """Up to `most` counts from 1 to `total`, both included."""
    spaced = np.geomspace(1, total, max(2, min(most, total)))
    return sorted({*np.rint(spaced).astype(int).tolist(), *(range(1, total + 1) if total <= most else ())})
