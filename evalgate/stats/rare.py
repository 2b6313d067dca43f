"""Means over documents most of which are alike: intervals that do not estimate a spread from nothing.

Identical outcomes everywhere (no flip at all, KL 0 at every position) have no spread, and a clustered interval of zero
width claims a certainty that the sample does not give: the next document may be different. The bound here needs no
spread, only a range. For independent values in [0, 1] with sample mean x, Hoeffding (1963, theorem 1) gives
P(sample mean <= x) <= exp(-G kl(x, m)) below a true mean m, with kl the divergence of two coins. At x = 0 the limit is
1 - tail^(1/G), the exact binomial "rule of three" over documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite, log

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Limits
from evalgate.errors import UsageError
from evalgate.stats.ratio import check_confidence, effective_number
from evalgate.stats.scale import linear

Floats = NDArray[np.float64]

FEW = 5  # fewer differing documents than this show no spread that an interval could rest on
METHOD = "hoeffding"
DEFAULT_CLIP = 10.0  # distances to the limit, where a metric has no range
NO_LIMITS = Limits()


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
    return Alike(value, deviations, weights, effective_number(sizes[present]))


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
    """What a figure has to keep, which says how far one document counts where nothing else does.

    limits: on the reporting scale. A range without an end is cut at `clip` times the distance between the documents'
    shared value and the limit, so that a pass speaks of document means cut to that reach. clip None = DEFAULT_CLIP
    where the metric's range has no end, and the range itself where it has.
    """

    limits: Limits = NO_LIMITS
    clip: float | None = None


NOTHING_HELD = RareEvents()


@dataclass(frozen=True)
class Range:
    """How far one document can be from the others.

    support: the range of a document's mean, on the scale on which means are taken; infinite = no end. held: limits that
    cut it. scale: on which they are given, see `Statistic`.
    """

    support: tuple[float, float] = (-inf, inf)
    held: RareEvents = NOTHING_HELD
    scale: str = "identity"

    def room(self, value: float) -> tuple[float, float]:
        """Distances below and above the shared value; infinite where neither the range nor a limit gives one."""
        limits = self.held.limits
        on_line = [linear(x, self.scale) for x in (limits.low, limits.high) if x is not None]
        # A limit at the shared value itself is one that no sample can show to be kept.
        distance = max((abs(x - value) for x in on_line), default=inf) or inf
        below, above = max(value - self.support[0], 0.0), max(self.support[1] - value, 0.0)
        return self._cut(below, distance), self._cut(above, distance)

    def share(self, allowed: float) -> float:
        """The largest share of a document beyond a percentile's end, where `allowed` of all positions may lie there."""
        return 1.0 if self.held.clip is None else min(1.0, self.held.clip * allowed)

    def _cut(self, room: float, distance: float) -> float:
        clip = self.held.clip
        if clip is None and isfinite(room):
            return room
        return min(room, (clip or DEFAULT_CLIP) * distance)


UNBOUNDED = Range()
