"""Values sorted once, with every unit's share of each rank: what percentile intervals are read from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from evalgate.stats import rare
from evalgate.stats.ratio import ratio_interval

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Side = Literal["below", "above"]

_CELLS = 1 << 22  # in the table of counts by unit and block
_MAX_BLOCKS = 2048
_LEAST_WIDTH = 256  # ranks of a block, which are counted as quickly as one


@dataclass(frozen=True)
class End:
    """One end of a percentile's interval; None = open. alike: whether it rests on the bound that needs no spread."""

    value: float | None
    alike: bool = False


@dataclass(frozen=True)
class OrderedValues:
    """Values sorted and cut into blocks of `width` ranks.

    values [n] ascending. owner [n]: unit of each rank. until [blocks, units]: a unit's values up to the end of a block.
    sizes [units]: all of them.
    """

    values: Floats
    owner: NDArray[np.int32]
    until: NDArray[np.int32]
    sizes: Floats
    width: int

    @classmethod
    def of(cls, values: Floats, codes: Integers) -> OrderedValues:
        """Sort values [n] of the units codes [n] >= 0; codes that do not occur are left out."""
        present = np.bincount(codes) > 0
        renumber = (np.cumsum(present) - 1).astype(np.int32)
        groups, n = int(present.sum()), len(values)
        width = max(-(-n // max(1, min(_MAX_BLOCKS, _CELLS // groups))), min(_LEAST_WIDTH, n))
        # Not stable: counts are taken at ranks between different values, where the order of equal ones cannot matter.
        order = np.argsort(values)
        owner = renumber[codes][order]
        ordered = values[order]
        zeros = slice(*(int(np.searchsorted(ordered, 0.0, side)) for side in ("left", "right")))
        ordered[zeros] = 0.0  # whichever of 0 and -0 comes first
        until = np.empty((-(-n // width), groups), np.int32)
        total = np.zeros(groups, np.int32)
        for block, start in enumerate(range(0, n, width)):
            total += np.bincount(owner[start : start + width], minlength=groups).astype(np.int32)
            until[block] = total
        return cls(ordered, owner, until, total.astype(np.float64), width)

    def counts(self, rank: int) -> Floats:
        """Values of each unit [units] among the first `rank` ones."""
        block, offset = divmod(rank, self.width)
        before = self.until[block - 1].astype(np.float64) if block else np.zeros(len(self.sizes))
        if offset:
            start = block * self.width
            before += np.bincount(self.owner[start : start + offset], minlength=len(self.sizes))
        return before

    def beyond(self, value: float, side: Side) -> Floats:
        """Values of each unit [units] strictly below, or strictly above, the value."""
        if side == "below":
            return self.counts(int(np.searchsorted(self.values, value, side="left")))
        return self.sizes - self.counts(int(np.searchsorted(self.values, value, side="right")))


def interpolated(values: Floats, level: float) -> float:
    """The percentile `level` (percent) of values [n] ascending, by linear interpolation: numpy's, to the last bit.

    `numpy.percentile` copies the values and partitions them once a level, which for many levels of millions of values
    takes longer than everything else.
    """
    place = (len(values) - 1) * (level / 100)
    below = int(place)
    if below >= len(values) - 1:
        return float(values[-1])
    low, high = float(values[below]), float(values[below + 1])
    share = place - below
    step = high - low
    return high - step * (1 - share) if share >= 0.5 else low + step * share


def percentile_end(ordered: OrderedValues, side: Side, allowed: float, *, confidence: float, reach: rare.Range) -> End:
    """One end of a quantile's interval, by test inversion (Woodruff 1952): the value nearest to the quantile such that
    surely less than `allowed` of all positions lie strictly beyond it.

    "Surely" is by the interval of that share over units. It takes values of at least `rare.FEW` units beyond the end
    (of all, where there are fewer) and as many on its near side. Further out the bound that needs no spread decides,
    and that takes many units: 368 for a 99th percentile. Where neither does, the end is open: what lies past a sample's
    last few values it cannot say. Needs 2 units.
    """
    n, units = len(ordered.values), len(ordered.sizes)
    least, total = min(rare.FEW, units), float(ordered.sizes.sum())

    def counts(place: int) -> Floats:
        # Places run outward from the end of the sample on the near side, so that ever less lies beyond.
        return ordered.beyond(float(ordered.values[n - 1 - place if side == "below" else place]), side)

    def spread_out(place: int) -> bool:
        return int(np.count_nonzero(counts(place))) >= least

    def by_spread(place: int) -> bool:
        found = counts(place)
        if found.sum() >= allowed * total or np.count_nonzero(ordered.sizes - found) < least:
            return False
        high = ratio_interval(found, ordered.sizes, confidence=confidence).high
        return high is not None and high < allowed

    def by_bound(place: int) -> bool:
        group = rare.alike(counts(place), ordered.sizes)
        if group is None:
            return False
        far = rare.alike_interval(group, below=0.0, above=reach.share(allowed) - group.value, confidence=confidence)
        return far[1] < allowed

    supported = _first(lambda place: not spread_out(place), 0, n)
    if supported and by_spread(supported - 1):
        place, alike = _first(by_spread, 0, supported), False
    elif supported < n and by_bound(n - 1):
        place, alike = _first(by_bound, supported, n), True
    else:
        return End(None)
    return End(float(ordered.values[n - 1 - place if side == "below" else place]), alike)


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The first place in [low, high) from which on `holds`; `high` where it never does."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
