"""Values sorted once, with every document's share of each rank: what percentile intervals are read from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evalgate.stats.clustered import ratio_interval

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

CHUNK_CELLS = 1 << 24  # cells in one temporary array
_MAX_BLOCKS = 2048
_EXACT_FLOAT32 = 1 << 24  # integers up to here add up exactly in float32


@dataclass(frozen=True)
class OrderedValues:
    """Values sorted and cut into blocks of `width` ranks.

    values [n] ascending. owner [blocks, width]: document code of each rank, `groups` for the padding after rank n.
    until [groups, blocks]: positions of a document up to the end of a block. sizes [groups]: all of them.
    """

    values: Floats
    owner: Integers
    until: NDArray[np.floating[Any]]
    sizes: Floats

    @classmethod
    def of(cls, values: Floats, codes: Integers, *, groups: int) -> OrderedValues:
        """Sort values [n] of documents codes [n] in [0, groups)."""
        n = len(values)
        width = -(-n // max(1, min(_MAX_BLOCKS, n, CHUNK_CELLS // groups)))
        blocks = -(-n // width)
        order = np.argsort(values, kind="stable")
        owner = np.full(blocks * width, groups, dtype=np.int64)
        owner[:n] = codes[order]
        cell = owner[:n] * blocks + np.arange(n) // width
        until = np.bincount(cell, minlength=groups * blocks).reshape(groups, blocks).cumsum(axis=1)
        sizes = until[:, -1].astype(np.float64)
        # The largest possible resample is the longest document drawn every time.
        small = sizes.max() * groups < _EXACT_FLOAT32
        cells: NDArray[np.floating[Any]] = until.astype(np.float32) if small else until.astype(np.float64)
        return cls(values[order], owner.reshape(blocks, width), cells, sizes)

    def percentiles(self, counts: Integers, share: Floats) -> Floats:
        """Percentiles [r, levels] of the resamples counts [r, groups], linear interpolation; share in (0, 1)."""
        until = np.asarray(counts.astype(self.until.dtype) @ self.until, dtype=np.int64)
        drawn = np.concatenate([counts, np.zeros((len(counts), 1), dtype=counts.dtype)], axis=1)
        rank = share[None, :] * (until[:, -1:] - 1)
        below = np.floor(rank).astype(np.int64)
        above = np.minimum(below + 1, until[:, -1:] - 1)
        out = np.empty(rank.shape, dtype=np.float64)
        for level in range(len(share)):
            low = self._at(below[:, level], until, drawn)
            high = self._at(above[:, level], until, drawn)
            out[:, level] = low + (rank[:, level] - below[:, level]) * (high - low)
        return out

    def limits(self, share: float, *, confidence: float) -> tuple[float, float]:
        """Test inversion (Woodruff 1952): the values whose clustered interval for P(X <= value) holds `share`.

        Reaches further than a bootstrap on the side where few documents carry the tail. Needs 2 documents.
        """
        n = len(self.values)

        def too_low(k: int) -> bool:
            interval = ratio_interval(self._counts(self.values[k], "right"), self.sizes, confidence=confidence)
            return interval.high is not None and interval.high < share

        def too_high(k: int) -> bool:
            interval = ratio_interval(self._counts(self.values[k], "left"), self.sizes, confidence=confidence)
            return interval.low is not None and interval.low > share

        # Invariant of both searches: the answer is in [low, high).
        low, high = 0, n - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if too_low(middle) else (low, middle)
        first = low
        low, high = 0, n
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if too_high(middle) else (middle, high)
        return float(self.values[first]), float(self.values[max(low, first)])

    def _counts(self, value: np.float64, side: Any) -> Floats:
        # Positions of each document at or below (right) or strictly below (left) the value.
        rank = int(np.searchsorted(self.values, value, side=side))
        block, offset = divmod(rank, self.owner.shape[1])
        groups = len(self.sizes)
        before = self.until[:, block - 1].astype(np.float64) if block else np.zeros(groups)
        if offset:
            before += np.bincount(self.owner[block, :offset], minlength=groups)[:groups]
        return before

    def _at(self, rank: Integers, until: Integers, drawn: Integers) -> Floats:
        # Order statistic `rank` [r] (from 0) of every resample; until [r, blocks]: positions up to a block's end.
        rows = np.arange(len(rank))
        block = (until <= rank[:, None]).sum(axis=1)
        before = np.where(block > 0, until[rows, np.maximum(block - 1, 0)], 0)
        out = np.empty(len(rank))
        width = self.owner.shape[1]
        step = max(1, CHUNK_CELLS // width)
        for start in range(0, len(rank), step):
            part = rows[start : start + step]
            inside = np.cumsum(drawn[part[:, None], self.owner[block[part]]], axis=1)
            offset = (inside <= (rank[part] - before[part])[:, None]).sum(axis=1)
            out[part] = self.values[block[part] * width + offset]
        return out
