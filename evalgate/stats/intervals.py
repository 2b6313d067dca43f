"""Every interval that evalgate prints or judges by is made here: of one statistic of one sample, at any confidence.

A summary, `slices`, `compare`, `verify`, the noise floor and the gate all ask `Sample.figure`, so that they cannot
disagree. The arithmetic is in `ratio` and `clustered` (means), `ordered` and `percentiles`, `correlation`, `estimated`
(values with errors of their own), `rare` (documents that show no spread) and `units` (one long text).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, inf, isfinite, sqrt

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Exactness, Figure, Interval
from evalgate.errors import ScoreError
from evalgate.metrics import Series, Statistic
from evalgate.stats.clustered import clustered_mean
from evalgate.stats.correlation import correlation
from evalgate.stats.estimated import not_below, sampling_error, with_sampling
from evalgate.stats.ordered import interpolated
from evalgate.stats.percentiles import Percentiles
from evalgate.stats.rare import NOTHING_HELD, Range, RareEvents
from evalgate.stats.scale import range_of_mean, scaled
from evalgate.stats.units import Windows

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """One series of values and the documents they come from: its statistics, each with its interval.

    documents [m]: codes >= 0 of the series' values. windows [m]: the window of each, in the order of the text, for
    intervals within one text; None = a single document has no interval. support: the metric's range.
    """

    series: Series
    documents: Integers
    windows: Windows | None = None
    support: tuple[float, float] = (-inf, inf)
    exactness: Exactness = "exact"

    def figure(
        self,
        statistic: Statistic,
        *,
        confidence: float = 0.95,
        rare: RareEvents = NOTHING_HELD,
    ) -> Figure:
        """A statistic with its interval; extremes and sampling errors have none.

        rare: what the figure has to keep, which matters only where the documents show no spread.

        Raises:
            ScoreError: no positions, a figure that is not finite or overflows, or values without errors of their own.
        """
        if statistic.kind == "mean":
            return self._mean(statistic, confidence, rare)
        if statistic.kind == "percentile":
            return self._percentiles.figure(
                statistic.level, confidence=confidence, exactness=self.exactness, reach=Range(held=rare)
            )
        if statistic.kind == "correlation":
            raise ScoreError(f"{statistic.name} is a correlation and needs a second series: ask `correlation`")
        return self._single(statistic, confidence)

    def value(self, statistic: Statistic) -> float:
        """The statistic without an interval, from its definition alone: what `figure` must agree with."""
        one = self.series
        if statistic.kind == "percentile":
            return interpolated(self._ranked, statistic.level)
        if statistic.kind != "mean":
            return self._single(statistic, 0.95).known
        size = len(one.values) if one.sizes is None else float(one.sizes.sum())
        if not size:
            raise ScoreError(f"{statistic.name} has nothing to divide by: widen the selection")
        mean = float(one.values.sum()) / size + one.below
        return {"identity": mean, "exp": exp(min(mean, 709.0)), "sqrt": sqrt(max(mean, 0.0))}[statistic.scale]

    def correlation(self, other: Series, *, confidence: float = 0.95) -> Figure | None:
        """Pearson's correlation with another series of the same positions; None where either is constant."""
        return correlation(
            self.series.values,
            other.values,
            self.documents,
            windows=self.windows,
            confidence=confidence,
            exactness=self.exactness,
        )

    def _mean(self, statistic: Statistic, confidence: float, rare: RareEvents) -> Figure:
        one = self.series
        found = with_sampling(self._clustered(one, statistic, confidence, rare), one.se)
        if one.below and one.low is not None:
            bounds = replace(one, values=one.low, se=None, low=None)
            found = not_below(found, self._clustered(bounds, statistic, confidence, rare))
        if not isfinite(found.known):
            raise ScoreError("the figure is not finite: score again")
        return scaled(found, statistic.scale, support=self.support)

    def _clustered(self, one: Series, statistic: Statistic, confidence: float, rare: RareEvents) -> Figure:
        return clustered_mean(
            one.values,
            self.documents,
            sizes=one.sizes,
            windows=self.windows,
            reach=Range(range_of_mean(self.support, statistic.scale), rare, statistic.scale),
            confidence=confidence,
            exactness=self.exactness,
        )

    def _single(self, statistic: Statistic, confidence: float) -> Figure:
        one = self.series
        if statistic.kind == "sampling":
            if one.se is None:
                raise ScoreError(f"{statistic.name} needs values with errors of their own: ask an estimated metric")
            value = sampling_error(one.se)
        else:
            value = float(one.values.min() if statistic.kind == "min" else one.values.max())
        return Figure(
            value,
            Interval(None, None, confidence),
            n=len(one.values),
            documents=int(np.count_nonzero(np.bincount(self.documents))),
            exactness=self.exactness,
        )

    @cached_property
    def _ranked(self) -> Floats:
        return np.sort(self.series.values)

    @cached_property
    def _percentiles(self) -> Percentiles:
        return Percentiles.of(self.series.values, self.documents, se=self.series.se, windows=self.windows)
