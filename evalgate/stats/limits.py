"""A figure's interval as a limit needs it: at any confidence, and honest where the documents show no spread.

The interval is that of the summary (`clustered`, `bootstrap`); where documents are alike (`rare.alike`) it is widened
by a bound that needs no spread. That bound asks how far one document could be from the others: to the end of the
metric's range, and where there is none, or the caller says so, `clip` times the distance between the shared value and
the limit. A pass then speaks of document means cut to that reach.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isfinite, log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Estimate
from evalgate.errors import ScoreError
from evalgate.metrics import Series, Statistic
from evalgate.stats import rare
from evalgate.stats.bootstrap import METHOD as BOOTSTRAP
from evalgate.stats.bootstrap import DocumentBootstrap
from evalgate.stats.clustered import clustered_mean, document_sums
from evalgate.stats.estimated import with_sampling
from evalgate.stats.ordered import OrderedValues
from evalgate.stats.scale import scaled

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

DEFAULT_CLIP = 10.0  # distances to the limit, where a metric has no range


class Span(NamedTuple):
    """A figure with the interval that a limit is held against.

    low, high: None where that end is unknown or unbounded. alike: whether the documents show no spread.
    """

    value: float | None
    low: float | None
    high: float | None
    confidence: float
    method: str
    alike: bool = False


@dataclass(frozen=True)
class Limits:
    """What a figure has to keep: low <= figure <= high, None = no limit on that side."""

    low: float | None
    high: float | None


@dataclass(frozen=True)
class LimitFigure:
    """One statistic of one series over some documents.

    documents [m]: codes >= 0 of the series' values. support: the metric's range. clip: None = the metric's own range,
    DEFAULT_CLIP where it has none. `spans` may be asked at several confidences; what can be is computed once.
    """

    series: Series
    documents: Integers
    statistic: Statistic
    support: tuple[float, float]
    seed: int
    clip: float | None = None

    def span(self, limits: Limits, *, confidence: float) -> Span:
        """The interval at this confidence; the limits only matter where documents are alike.

        Raises:
            ScoreError: no positions, or a figure that overflows.
        """
        if self.statistic.kind == "percentile":
            return self._percentile(limits, confidence=confidence)
        return self._mean(limits, confidence=confidence)

    def _mean(self, limits: Limits, *, confidence: float) -> Span:
        clustered = clustered_mean(self.series.values, self.documents, sizes=self.series.sizes, confidence=confidence)
        estimate = with_sampling(clustered, self.series.se)
        support = self.support if self.statistic.scale == "identity" else (-inf, inf)
        method = estimate.method
        if estimate.low is not None and estimate.high is not None and self._alike is not None:
            low, high = self._widened(self._alike, limits, support, confidence=confidence)
            estimate = replace(estimate, low=min(estimate.low, low), high=max(estimate.high, high))
            method = f"{estimate.method}, {rare.METHOD}"
        shown = _on_scale(estimate, self.statistic.scale, support)
        return Span(shown.value, shown.low, shown.high, confidence, method, alike=self._alike is not None)

    def _widened(
        self, group: rare.Alike, limits: Limits, support: tuple[float, float], *, confidence: float
    ) -> tuple[float, float]:
        on_line = [linear(x, self.statistic.scale) for x in (limits.low, limits.high) if x is not None]
        if not on_line:
            return group.value, group.value
        # A limit at the shared value itself is one that no sample can show to be kept.
        distance = max(abs(x - group.value) for x in on_line) or inf
        below, above = self._reach(group.value - support[0], distance), self._reach(support[1] - group.value, distance)
        return rare.alike_interval(group, below=below, above=above, confidence=confidence)

    def _reach(self, room: float, distance: float) -> float:
        """How far a document may be from the others: `room` to the end of the range, cut by the clip."""
        room = max(room, 0.0)
        if self.clip is None and isfinite(room):
            return room
        return min(room, (self.clip or DEFAULT_CLIP) * distance)

    def _percentile(self, limits: Limits, *, confidence: float) -> Span:
        value = float(np.percentile(self.series.values, self.statistic.level))
        if self._bootstrap.groups < 2:
            return Span(value, None, None, confidence, "none")
        ends = [self._ends(*drawn, confidence=confidence) for drawn in self._drawn]
        low, high = min(value, ends[0][0]), max(value, ends[-1][1])
        if high > low:
            return Span(value, low, high, confidence, BOOTSTRAP)
        sure_low, sure_high = self._sides(limits, value, confidence=confidence)
        return Span(
            value,
            low if sure_low else None,
            high if sure_high else None,
            confidence,
            f"{BOOTSTRAP}, {rare.METHOD}",
            alike=True,
        )

    def _sides(self, limits: Limits, value: float, *, confidence: float) -> tuple[bool, bool]:
        """Whether a percentile without spread is surely above the limits below it, and below those above it.

        It is at most x exactly when the share of positions above x is at most 1 - level, and at least x when the share
        below x is at most level.
        """
        level = self.statistic.level / 100
        values = self.series.values
        above: list[float] = []
        below: list[float] = []
        if limits.low is not None:
            (above if value >= limits.low else below).append(limits.low)
        if limits.high is not None:
            (below if value <= limits.high else above).append(limits.high)
        sure_above = all(self._share_within(values < x, level, confidence=confidence) for x in above)
        sure_below = all(self._share_within(values > x, 1 - level, confidence=confidence) for x in below)
        return sure_above, sure_below

    def _share_within(self, beyond: NDArray[np.bool_], allowed: float, *, confidence: float) -> bool:
        """Whether the share of positions that are beyond [m] is at most `allowed`, with certainty."""
        sums = document_sums(beyond.astype(np.float64), self.documents)
        group = rare.alike(sums.totals, sums.sizes)
        if group is None:
            return True
        room = 1 - group.value
        reach = room if self.clip is None else min(room, self.clip * allowed)
        return rare.alike_interval(group, below=0.0, above=reach, confidence=confidence)[1] <= allowed

    @cached_property
    def _alike(self) -> rare.Alike | None:
        sums = document_sums(self.series.values, self.documents, sizes=self.series.sizes)
        return rare.alike(sums.totals, sums.sizes)

    @cached_property
    def _bootstrap(self) -> DocumentBootstrap:
        return DocumentBootstrap.of(self.documents, seed=self.seed)

    @cached_property
    def _drawn(self) -> list[tuple[OrderedValues, Floats]]:
        """Values in order and their resampled percentiles; of values - se and values + se where they are estimates."""
        values, se = self.series.values, self.series.se
        return [
            (self._bootstrap.order(v), self._bootstrap.percentiles(v, [self.statistic.level])[:, 0])
            for v in ([values] if se is None else [values - se, values + se])
        ]

    def _ends(self, ordered: OrderedValues, replicates: Floats, *, confidence: float) -> tuple[float, float]:
        span = self._bootstrap.interval(replicates, confidence=confidence) or ()
        first, last = ordered.limits(self.statistic.level / 100, confidence=confidence)
        return min(first, *span), max(last, *span)


def linear(limit: float, scale: str) -> float:
    """A limit on the scale on which the mean is taken."""
    if scale == "identity":
        return limit
    if scale == "sqrt":
        return limit * limit
    return log(limit) if limit > 0 else -inf


def _on_scale(estimate: Estimate, scale: str, support: tuple[float, float]) -> Estimate:
    """The estimate on its reporting scale; infinite ends become unknown ones."""
    low, high = estimate.low, estimate.high
    if low is not None and not isfinite(low):
        low = None
    if high is not None and not isfinite(high):
        high = None
    if not isfinite(estimate.value):
        raise ScoreError("the figure is not finite: score again")
    return scaled(replace(estimate, low=low, high=high), scale, support=support)
