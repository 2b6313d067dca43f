"""Means over documents most of which are alike: intervals that do not estimate a spread from nothing.

Identical outcomes everywhere (no flip at all, KL 0 at every position) have no spread, and a clustered interval of zero
width claims a certainty that the sample does not give: the next document may be different. The bound here needs no
spread, only a range. For independent values in [0, 1] with sample mean x, Hoeffding (1963, theorem 1) gives
P(sample mean <= x) <= exp(-G kl(x, m)) below a true mean m, with kl the divergence of two coins. At x = 0 the limit is
1 - tail^(1/G), the exact binomial "rule of three" over documents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isfinite, log

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Figure, Interval, Limits
from evalgate.errors import UsageError
from evalgate.stats.clustered import DocumentSums, Integers, check_confidence, document_sums, effective_df
from evalgate.stats.scale import linear

Floats = NDArray[np.float64]

FEW = 5  # fewer differing documents than this show no spread that an interval could rest on
METHOD = "hoeffding"
DEFAULT_CLIP = 10.0  # distances to the limit, where a metric has no range


@dataclass(frozen=True)
class Alike:
    """Documents that share one value, but for a few.

    value: what they share. deviations [G]: of every document's mean from it. weights [G]: sizes, adding up to 1.
    effective: the number of equally long documents that would say as much (Kish 1965).
    """

    value: float
    deviations: Floats
    weights: Floats
    effective: float

    @property
    def differing(self) -> int:
        """How many documents deviate at all."""
        return int(np.count_nonzero(self.deviations))


def alike(totals: Floats, sizes: Floats) -> Alike | None:
    """The shared value of document means totals / sizes [G], None where the documents show a spread.

    They show none when fewer than FEW differ from the median document, and more share its mean than differ from it.
    """
    present = sizes > 0
    means = totals[present] / sizes[present]
    weights = sizes[present] / sizes[present].sum()
    value = float(np.sort(means)[len(means) // 2])
    deviations = means - value
    deviations[np.abs(deviations) <= 1e-12 * abs(value)] = 0.0  # rounding of a mean of equal values
    differing = int(np.count_nonzero(deviations))
    if differing >= FEW or differing >= len(means) - differing:
        return None
    return Alike(value, deviations, weights, effective_df(sizes[present]) + 1 if len(means) > 1 else 1.0)


def alike_interval(group: Alike, *, below: float, above: float, confidence: float) -> tuple[float, float]:
    """Interval of the mean of document means, deviations cut to [-below, above]; an infinite range is no bound.

    below, above: >= 0, how far a document can be from the shared value.

    Raises:
        UsageError: a range is negative or NaN, or confidence is not in (0, 1).
    """
    check_confidence(confidence)
    if not (below >= 0 and above >= 0):
        raise UsageError(f"a range cannot be negative, as in [-{below}, {above}]")
    # Both directions can go wrong only where there is room in both: then each gets half the error rate.
    each = confidence if 0 in (below, above) else (1 + confidence) / 2
    up = _part(group, above, sign=1, confidence=each)
    down = _part(group, below, sign=-1, confidence=each)
    return group.value + up[0] - down[1], group.value + up[1] - down[0]


def _part(group: Alike, reach: float, *, sign: int, confidence: float) -> tuple[float, float]:
    """Interval of the mean of max(0, sign * deviation), cut to [0, reach]."""
    if reach == 0:
        return 0.0, 0.0
    if not isfinite(reach):
        return 0.0, inf
    mean = float(np.clip(sign * group.deviations / reach, 0, 1) @ group.weights)
    low, high = hoeffding_interval(min(mean, 1.0), group.effective, confidence=confidence)
    return low * reach, high * reach


def hoeffding_interval(mean: float, n: float, *, confidence: float) -> tuple[float, float]:
    """Two-sided interval for the mean of values in [0, 1] from the mean of n independent ones; see the module's text.

    Raises:
        UsageError: mean is outside [0, 1] or n is not positive.
    """
    check_confidence(confidence)
    if not (0 <= mean <= 1 and n > 0):
        raise UsageError(f"a mean of {mean} over {n} values is no mean of values in [0, 1]")
    bar = log(2 / (1 - confidence)) / n
    return _edge(mean, 0.0, bar), _edge(mean, 1.0, bar)


def _edge(mean: float, end: float, bar: float) -> float:
    """The m between mean and end with kl(mean, m) = bar, on the far side by rounding; `end` where none reaches it."""
    inside, outside = mean, end
    if _coin_divergence(mean, end) <= bar:
        return end
    for _ in range(100):
        middle = (inside + outside) / 2
        if _coin_divergence(mean, middle) <= bar:
            inside = middle
        else:
            outside = middle
    return outside


def _coin_divergence(p: float, q: float) -> float:
    """KL divergence of coins with heads p and q, in nats."""
    total = 0.0
    for a, b in ((p, q), (1 - p, 1 - q)):
        if a > 0:
            total += a * log(a / b) if b > 0 else inf
    return total


@dataclass(frozen=True)
class RareEvents:
    """Widens intervals of documents that show no spread by the bound above, for a figure that has to keep limits.

    The bound asks how far one document could be from the others: to the end of the metric's range, and where there is
    none, or the caller gives a clip, `clip` times the distance between the shared value and the limit (None =
    DEFAULT_CLIP where the metric has no range). A pass then speaks of document means cut to that reach.
    """

    limits: Limits
    clip: float | None = None

    def mean(self, figure: Figure, sums: DocumentSums, *, scale: str, support: tuple[float, float]) -> Figure:
        """A mean before scaling, from documents' sums; `support` is the metric's range. Infinite ends become open."""
        low, high = figure.low, figure.high
        group = alike(sums.totals, sums.sizes)
        if group is None:
            return figure
        if low is None or high is None:
            return replace(figure, alike=True)
        interval = figure.interval
        confidence = interval.confidence
        sure = self._mean_ends(group, support if scale == "identity" else (-inf, inf), scale, confidence)
        low, high = min(low, sure[0]), max(high, sure[1])
        widened = Interval(
            low if isfinite(low) else None,
            high if isfinite(high) else None,
            confidence,
            f"{interval.method}, {METHOD}",
            interval.label,
        )
        return replace(figure, interval=widened, alike=True)

    def percentile(self, figure: Figure, values: Floats, documents: Integers, level: float) -> Figure:
        """A percentile of values [m]; where it shows no spread, an end is open that is not sure to keep its limits."""
        low, high, interval = figure.low, figure.high, figure.interval
        if low is None or high is None:
            return replace(figure, interval=replace(interval, method="none"))
        if high > low:
            return figure
        sure_low, sure_high = self._sides(values, documents, figure.known, level / 100, interval.confidence)
        widened = Interval(
            low if sure_low else None,
            high if sure_high else None,
            interval.confidence,
            f"{interval.method}, {METHOD}",
            interval.label,
        )
        return replace(figure, interval=widened, alike=True)

    def _mean_ends(
        self, group: Alike, support: tuple[float, float], scale: str, confidence: float
    ) -> tuple[float, float]:
        on_line = [linear(x, scale) for x in (self.limits.low, self.limits.high) if x is not None]
        if not on_line:
            return group.value, group.value
        # A limit at the shared value itself is one that no sample can show to be kept.
        distance = max(abs(x - group.value) for x in on_line) or inf
        below, above = self._reach(group.value - support[0], distance), self._reach(support[1] - group.value, distance)
        return alike_interval(group, below=below, above=above, confidence=confidence)

    def _reach(self, room: float, distance: float) -> float:
        """How far a document may be from the others: `room` to the end of the range, cut by the clip."""
        room = max(room, 0.0)
        if self.clip is None and isfinite(room):
            return room
        return min(room, (self.clip or DEFAULT_CLIP) * distance)

    def _sides(
        self, values: Floats, documents: Integers, value: float, level: float, confidence: float
    ) -> tuple[bool, bool]:
        """Whether a percentile without spread is surely above the limits below it, and below those above it.

        It is at most x exactly when the share of positions above x is at most 1 - level, and at least x when the share
        below x is at most level.
        """
        above: list[float] = []
        below: list[float] = []
        if self.limits.low is not None:
            (above if value >= self.limits.low else below).append(self.limits.low)
        if self.limits.high is not None:
            (below if value <= self.limits.high else above).append(self.limits.high)

        def within(beyond: NDArray[np.bool_], allowed: float) -> bool:
            return self._share_within(beyond, documents, allowed, confidence)

        return all(within(values < x, level) for x in above), all(within(values > x, 1 - level) for x in below)

    def _share_within(self, beyond: NDArray[np.bool_], documents: Integers, allowed: float, confidence: float) -> bool:
        """Whether the share of positions that are beyond [m] is at most `allowed`, with certainty."""
        sums = document_sums(beyond.astype(np.float64), documents)
        group = alike(sums.totals, sums.sizes)
        if group is None:
            return True
        room = 1 - group.value
        reach = room if self.clip is None else min(room, self.clip * allowed)
        return alike_interval(group, below=0.0, above=reach, confidence=confidence)[1] <= allowed
