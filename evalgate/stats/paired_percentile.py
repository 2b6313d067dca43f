"""A percentile of one side minus that of another, on the same positions and paired by document."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from evalgate.stats.clustered import DocumentSums, document_sums, mean_ends
from evalgate.stats.rare import FEW, Range

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

METHOD = "paired test-inversion"


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
        """The interval: every difference that the clustered interval of `beyond` does not rule out.

        None: an end past which fewer than `rare.FEW` documents go, or with which nothing is ruled out, for a sample
        says nothing of what lies past its extremes. Both are None for fewer than 2 documents.
        """
        if len(self.beyond(0.0).sizes) < 2:
            return None, None
        steps = np.unique(self.first - self.percentiles[1])
        too_low = bisect_left(steps, True, key=lambda x: not self._share(x, confidence)[0] > 0)
        too_high = bisect_left(steps, True, key=lambda x: self._share(x, confidence)[1] < 0)
        first = None if too_low == 0 else min(self.value, float(steps[too_low - 1]))
        last = None if too_high == len(steps) else max(self.value, float(steps[too_high]))
        return (
            first if first is not None and self._carried(self.second, self.percentiles[0] - first) else None,
            last if last is not None and self._carried(self.first, self.percentiles[1] + last) else None,
        )

    def _share(self, difference: float, confidence: float) -> tuple[float, float]:
        """The clustered interval of the mean of `beyond`."""
        found = mean_ends(self.beyond(difference), Range((-1.0, 1.0)), confidence=confidence)
        return found.low, found.high

    def _carried(self, values: Floats, limit: float) -> bool:
        return len(np.unique(self.documents[values >= limit])) >= FEW
