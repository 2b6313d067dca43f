"""Percentiles with intervals by test inversion over documents; an end that the sample cannot support is open."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Exactness, Figure
from evalgate.errors import ScoreError, UsageError
from evalgate.stats import rare
from evalgate.stats.clustered import Ends, figure
from evalgate.stats.ordered import End, OrderedValues, interpolated, percentile_end
from evalgate.stats.ratio import check_confidence, t_quantile
from evalgate.stats.units import Units, Windows

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

METHOD = "test-inversion"


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of values sorted once, at any level and confidence.

    values [n], ascending; lower, upper: what the low and the high end are read from, over every kind of unit. They are
    the values, or values - se and values + se where the values are estimates: their noise pulls percentiles outward.
    """

    values: Floats
    units: Units
    lower: tuple[OrderedValues, ...]
    upper: tuple[OrderedValues, ...]

    @classmethod
    def of(
        cls, values: Floats, documents: Integers, *, se: Floats | None = None, windows: Windows | None = None
    ) -> Percentiles:
        """Sort values [n] of documents [n] (codes >= 0). windows [n]: in the text's order. se [n]: standard errors.

        Raises:
            ScoreError: no positions.
        """
        if not len(values):
            raise ScoreError("there are no scored positions to rank: widen the selection")
        units = Units.of(documents, windows)
        if se is None:
            ordered = tuple(OrderedValues.of(values, codes) for codes in units.codes)
            return cls(ordered[0].values if ordered else np.sort(values), units, ordered, ordered)
        lower = tuple(OrderedValues.of(values - se, codes) for codes in units.codes)
        upper = tuple(OrderedValues.of(values + se, codes) for codes in units.codes)
        return cls(np.sort(values), units, lower, upper)

    def figure(
        self,
        level: float,
        *,
        confidence: float = 0.95,
        exactness: Exactness = "exact",
        reach: rare.Range = rare.UNBOUNDED,
    ) -> Figure:
        """The percentile at a level (percent in (0, 100), linear interpolation) with its interval.

        Its standard error is that of a normal figure whose interval is as wide; None where an end is open.

        Raises:
            UsageError: level is outside (0, 100), or confidence outside (0, 1).
        """
        if not 0 < level < 100:
            raise UsageError("percentile levels must lie between 0 and 100")
        check_confidence(confidence)
        value, share = interpolated(self.values, level), level / 100
        found = []
        for lower, upper in zip(self.lower, self.upper, strict=True):
            low = percentile_end(lower, "below", share, confidence=confidence, reach=reach)
            high = percentile_end(upper, "above", 1 - share, confidence=confidence, reach=reach)
            found.append(_ends(value, low, high, confidence=confidence, units=len(lower.sizes)))
        return figure(
            value,
            found,
            self.units,
            n=len(self.values),
            method=METHOD,
            confidence=confidence,
            exactness=exactness,
        )


def _ends(value: float, low: End, high: End, *, confidence: float, units: int) -> Ends:
    """Ends that hold the figure itself, which interpolates between values; infinite = open."""
    below = -inf if low.value is None else min(low.value, value)
    above = inf if high.value is None else max(high.value, value)
    se = None
    if isfinite(below) and isfinite(above):
        se = (above - below) / (2 * t_quantile(confidence, max(units - 1.0, 1.0)))
    return Ends(below, above, se, low.alike or high.alike)
