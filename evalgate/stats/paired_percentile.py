"""A percentile of one side minus that of another, on the same positions and paired by document.

A difference d is judged by two shares at once: of positions whose first value lies above x + d, and of those whose
second lies above x. Where d is the true difference and x the second side's percentile, both are what the level leaves.
That percentile is not known, so d gets the x that speaks best for it: the smallest of a quadratic form in the two
shares, whose weights are the inverse of their covariance over documents (a profile, as Hansen 1982 tests moments). The
sum of the two with the weights of that x is a mean over documents, and has the interval that every mean has.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evalgate.stats.clustered import DocumentSums, document_sums, mean_ends
from evalgate.stats.ordered import OrderedValues
from evalgate.stats.rare import FEW, Range

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

METHOD = "paired test-inversion"
_STEPS = 33  # values of x that are tried
_REACH = 4.5  # standard errors of the second side's share around its percentile in which they lie
_SINGULAR = 1e-9  # determinant over product of variances, below which both shares are one


class _Shares(NamedTuple):
    """Of one side above each x: totals over what is expected, [x, G]; means [x] over all positions; centred [x, G]."""

    totals: Floats
    means: Floats
    centred: Floats


@dataclass(frozen=True)
class PairedPercentile:
    """The percentile `level` (percent) of `first` minus that of `second`.

    first, second, documents (codes >= 0): [n], row by row the same position.
    """

    first: Floats
    second: Floats
    documents: Integers
    level: float

    @cached_property
    def percentiles(self) -> tuple[float, float]:
        """Both sides' percentiles, linear interpolation."""
        one, two = (float(np.percentile(values, self.level)) for values in (self.first, self.second))
        return one, two

    @property
    def value(self) -> float:
        """The difference."""
        return self.percentiles[0] - self.percentiles[1]

    def beyond(self, difference: float) -> DocumentSums:
        """By document: positions of the first side above its limit minus positions of the second above its own.

        The second side's limit is its percentile; the first side's lies `difference` higher. The mean falls as the
        difference grows, and is 0 where it is the true one.
        """
        limit = self.percentiles[1]
        more = (self.first > limit + difference).astype(np.float64) - (self.second > limit)
        return document_sums(more, self.documents)

    def ends(self, *, confidence: float) -> tuple[float | None, float | None]:
        """The interval: every difference that the two shares, weighed as the module says, do not rule out.

        None: an end past which fewer than `rare.FEW` documents go, or with which nothing is ruled out, for a sample
        says nothing of what lies past its extremes. Both are None for fewer than 2 documents.
        """
        if len(self._sizes) < 2:
            return None, None
        steps = np.unique(self.first - self.percentiles[1])
        middle = int(np.searchsorted(steps, self.value))
        too_low = bisect_left(steps[:middle], True, key=lambda d: self._holds(d, confidence))
        above = steps[middle:]
        too_high = bisect_left(above, True, key=lambda d: not self._holds(d, confidence))
        first = None if too_low == 0 else min(self.value, float(steps[too_low - 1]))
        last = None if too_high == len(above) else max(self.value, float(above[too_high]))
        return (
            first if first is not None and self._carried(self.second, self.percentiles[0] - first) else None,
            last if last is not None and self._carried(self.first, self.percentiles[1] + last) else None,
        )

    @cached_property
    def _ordered(self) -> tuple[OrderedValues, OrderedValues]:
        """Both sides, sorted once."""
        return OrderedValues.of(self.first, self.documents), OrderedValues.of(self.second, self.documents)

    @property
    def _sizes(self) -> Floats:
        """Positions by document, [G]."""
        return self._ordered[0].sizes

    @cached_property
    def _tried(self) -> Floats:
        """Values of x: the second side's around its percentile."""
        left, groups = 1 - self.level / 100, len(self._sizes)
        over = self._ordered[1].beyond(self.percentiles[1], "above") - left * self._sizes
        error = np.sqrt((over @ over) * groups / (groups - 1)) / self._sizes.sum()
        levels = 100 * (1 - left - error * np.linspace(-_REACH, _REACH, _STEPS))
        inside = levels[(levels > 0) & (levels < 100)]
        return np.unique([*np.percentile(self.second, inside, method="higher"), self.percentiles[1]])

    @cached_property
    def _second(self) -> _Shares:
        return self._shares(self._ordered[1], self._tried)

    def _shares(self, side: OrderedValues, limits: Floats) -> _Shares:
        expected = (1 - self.level / 100) * self._sizes
        totals = np.stack([side.beyond(float(limit), "above") for limit in limits]) - expected
        means = totals.sum(1) / self._sizes.sum()
        return _Shares(totals, means, totals - means[:, None] * self._sizes)

    def _holds(self, difference: float, confidence: float) -> bool:
        """Whether the shares leave room for the difference."""
        one, two = self._shares(self._ordered[0], self._tried + difference), self._second
        scale = len(self._sizes) / (len(self._sizes) - 1) / self._sizes.sum() ** 2
        own, other = scale * (one.centred**2).sum(1), scale * (two.centred**2).sum(1)
        both = scale * (one.centred * two.centred).sum(1)
        determinant = own * other - both**2
        regular = determinant > _SINGULAR * own * other
        with np.errstate(divide="ignore", invalid="ignore"):
            # The inverse covariance times the shares. Where the two shares are one, the second says it all; where they
            # should be and are not, nothing speaks for this x.
            weights = np.stack([other * one.means - both * two.means, own * two.means - both * one.means]) / determinant
            single = np.where(one.means == two.means, two.means / other, np.inf)
        weights = np.where(regular, weights, [np.zeros_like(single), single])
        with np.errstate(invalid="ignore"):
            form = np.where(np.isfinite(weights).all(0), weights[0] * one.means + weights[1] * two.means, np.inf)
        best = int(np.argmin(form))
        if not np.isfinite(form[best]):
            return False
        chosen = weights[:, best] / max(np.abs(weights[:, best]).max(), np.finfo(np.float64).tiny)
        totals = chosen[0] * one.totals[best] + chosen[1] * two.totals[best]
        found = mean_ends(DocumentSums(totals, self._sizes, len(self.first)), Range((-2.0, 2.0)), confidence=confidence)
        return found.low <= 0 <= found.high

    def _carried(self, values: Floats, limit: float) -> bool:
        return len(np.unique(self.documents[values >= limit])) >= FEW
