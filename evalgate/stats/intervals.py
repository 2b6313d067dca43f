"""Every interval that evalgate prints or judges by is made here: of one statistic of one sample, at any confidence.

A summary, `slices`, `compare`, `verify`, the noise floor and the gate all ask `Sample.figure`, so that they cannot
disagree. The arithmetic is in `clustered` (means), `bootstrap` and `ordered` (percentiles, correlations), `estimated`
(values with errors of their own) and `rare` (documents that show no spread).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Exactness, Figure, Interval
from evalgate.errors import ScoreError
from evalgate.metrics import Series, Statistic
from evalgate.stats.bootstrap import RESAMPLES, DocumentBootstrap, Percentiles, correlation
from evalgate.stats.clustered import DocumentSums, clustered_mean, document_sums
from evalgate.stats.estimated import sampling_error, with_sampling
from evalgate.stats.rare import RareEvents
from evalgate.stats.scale import scaled

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """One series of values and the documents they come from: its statistics, each with its interval.

    documents [m]: codes >= 0 of the series' values. support: the metric's range. seed, resamples: of the bootstrap.
    levels: the percentiles that will be asked for, so that one pass resamples them all; others cost a pass each.
    What does not depend on the confidence is computed once.
    """

    series: Series
    documents: Integers
    seed: int = 0
    support: tuple[float, float] = (-inf, inf)
    exactness: Exactness = "exact"
    resamples: int = RESAMPLES
    levels: tuple[float, ...] = ()

    def figure(self, statistic: Statistic, *, confidence: float = 0.95, rare: RareEvents | None = None) -> Figure:
        """A statistic with its interval; extremes and sampling errors have none.

        rare: widen where the documents show no spread; None = leave an interval of zero width as it is.

        Raises:
            ScoreError: no positions, a figure that is not finite or overflows, or values without errors of their own.
        """
        if statistic.kind == "mean":
            return self._mean(statistic, confidence, rare)
        if statistic.kind == "percentile":
            found = self._percentiles(statistic.level).figure(
                statistic.level, confidence=confidence, exactness=self.exactness
            )
            return (
                found if rare is None else rare.percentile(found, self.series.values, self.documents, statistic.level)
            )
        if statistic.kind == "correlation":
            raise ScoreError(f"{statistic.name} is a correlation and needs a second series: ask `correlation`")
        return self._single(statistic, confidence)

    def correlation(self, other: Series, *, confidence: float = 0.95) -> Figure | None:
        """Pearson's correlation with another series of the same positions; None where either is constant."""
        return correlation(
            self.series.values, other.values, self._bootstrap, confidence=confidence, exactness=self.exactness
        )

    def _mean(self, statistic: Statistic, confidence: float, rare: RareEvents | None) -> Figure:
        one = self.series
        found = clustered_mean(
            one.values, self.documents, sizes=one.sizes, confidence=confidence, exactness=self.exactness
        )
        found = with_sampling(found, one.se)
        if rare is not None:
            found = rare.mean(found, self._sums, scale=statistic.scale, support=self.support)
        if not isfinite(found.known):
            raise ScoreError("the figure is not finite: score again")
        return scaled(found, statistic.scale, support=self.support)

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
            documents=len(np.unique(self.documents)),
            exactness=self.exactness,
        )

    def _percentiles(self, level: float) -> Percentiles:
        if level in self.levels:
            return self._listed
        return Percentiles(self.series.values, self._bootstrap, (level,), self.series.se)

    @cached_property
    def _listed(self) -> Percentiles:
        return Percentiles(self.series.values, self._bootstrap, self.levels, self.series.se)

    @cached_property
    def _bootstrap(self) -> DocumentBootstrap:
        return DocumentBootstrap.of(self.documents, seed=self.seed, resamples=self.resamples)

    @cached_property
    def _sums(self) -> DocumentSums:
        return document_sums(self.series.values, self.documents, sizes=self.series.sizes)
