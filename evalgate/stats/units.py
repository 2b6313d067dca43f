"""What counts as one draw: a document or, where there is only one, stretches of consecutive windows within it.

One long text has no documents to compare. Its windows are correlated, by how much is not known, and so an interval is
taken over windows, over max(8, W / 4) batches and over 8 batches of consecutive windows, and their union is given: it
holds where the correlation dies out within an eighth of the text. It speaks of this text alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Windows = NDArray[np.int32] | NDArray[np.int64]

FEWEST_WINDOWS = 60
FEWEST_BATCHES = 8
WITHIN_TEXT = "within this text"
_TREND = 3.7074  # Student's t with 6 degrees of freedom, two-sided 1 %


@dataclass(frozen=True)
class Units:
    """Every way in which values are taken together: an interval is the union of those over each of `codes`.

    codes: arrays [n] of unit codes >= 0; none where the values allow no interval at all. documents: how many there are.
    """

    codes: tuple[Integers, ...]
    documents: int
    within_text: bool = False

    @classmethod
    def of(cls, documents: Integers, windows: Windows | None = None) -> Units:
        """Documents [n] (codes >= 0) where there are at least 2; else batches of `windows` [n] (indices, in order)."""
        count = int(np.count_nonzero(np.bincount(documents))) if len(documents) else 0
        if count >= 2:
            return cls((documents,), count)
        if windows is None:
            return cls((), count)
        rank, total = _ranked(windows)
        if total < FEWEST_WINDOWS:
            return cls((), count)
        numbers = (total, max(FEWEST_BATCHES, total // 4), FEWEST_BATCHES)
        return cls(tuple(_batches(rank, total, b) for b in numbers), count, within_text=True)


def drifts(values: Floats, windows: Windows) -> bool:
    """Whether the means of 8 batches of consecutive windows rise or fall along the text (slope, two-sided 1 %).

    values, windows: [n], of one text. False for fewer than FEWEST_WINDOWS windows.
    """
    rank, total = _ranked(windows)
    if total < FEWEST_WINDOWS:
        return False
    batch = _batches(rank, total, FEWEST_BATCHES)
    means = np.bincount(batch, weights=values, minlength=FEWEST_BATCHES) / np.bincount(batch, minlength=FEWEST_BATCHES)
    place = np.arange(FEWEST_BATCHES) - (FEWEST_BATCHES - 1) / 2
    slope = float(means @ place) / float(place @ place)
    rest = means - means.mean() - slope * place
    error = (float(rest @ rest) / (FEWEST_BATCHES - 2) / float(place @ place)) ** 0.5
    return bool(abs(slope) > _TREND * error)


def _ranked(windows: Windows) -> tuple[Integers, int]:
    found, rank = np.unique(windows, return_inverse=True)
    return rank.astype(np.int64), len(found)


def _batches(rank: Integers, total: int, number: int) -> Integers:
    return np.asarray(rank * number // total, dtype=np.int64)
