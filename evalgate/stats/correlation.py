"""Pearson's correlation over all positions, with an interval over documents.

Each document is left out in turn, on Fisher's scale atanh(r), and the moves take the place of a mean's residuals. Their
skewness says little about which side a correlation near 1 misses on, so neither side is made shorter by it: the side
away from the tail is lengthened too, by 0.4 times the kernel's first-order term.
"""

from __future__ import annotations

from math import atanh, tanh

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Exactness, Figure
from evalgate.errors import ScoreError
from evalgate.stats.clustered import Ends, figure
from evalgate.stats.ratio import check_confidence, ratio_interval
from evalgate.stats.units import Units, Windows

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

METHOD = "jackknife of atanh"
_NOT_SHORTER = 0.4
_ALMOST_ONE = 1 - 1e-12


def correlation(
    x: Floats,
    y: Floats,
    documents: Integers,
    *,
    windows: Windows | None = None,
    confidence: float = 0.95,
    exactness: Exactness = "exact",
) -> Figure | None:
    """Pearson correlation of x and y [n]; None where either is constant, or is so without one of the documents.

    documents (codes >= 0), windows (in the order of the text): [n].

    Raises:
        ScoreError: no positions.
    """
    check_confidence(confidence)
    if not len(x):
        raise ScoreError("there are no scored positions to correlate: widen the selection")
    x, y = x - x.mean(), y - y.mean()
    scale_x, scale_y = float(np.sqrt(np.square(x).mean())), float(np.sqrt(np.square(y).mean()))
    if scale_x == 0 or scale_y == 0:
        return None
    x /= scale_x
    y /= scale_y
    value = float(np.clip(np.mean(x * y), -1, 1))
    units = Units.of(documents, windows)
    found = [_ends(x, y, codes, value, confidence=confidence) for codes in units.codes]
    return figure(value, found, units, n=len(x), method=METHOD, confidence=confidence, exactness=exactness)


def _added(values: Floats, codes: Integers) -> Floats:
    return np.asarray(np.bincount(codes, weights=values), dtype=np.float64)


def _ends(x: Floats, y: Floats, codes: Integers, value: float, *, confidence: float) -> Ends:
    """The interval over units, open on the side where a correlation of all but 1 leaves nothing to go by."""
    # one at a time: six columns of tens of millions of positions are gigabytes
    added = [np.bincount(codes).astype(np.float64), _added(x, codes), _added(y, codes)]
    added += [_added(a * b, codes) for a, b in ((x, x), (y, y), (x, y))]
    sums = np.stack(added, axis=1)
    sums = sums[sums[:, 0] > 0]
    sizes = sums[:, 0]
    rest = sums.sum(axis=0) - sums
    n, sx, sy, sxx, syy, sxy = rest.T
    spread = (sxx / n - (sx / n) ** 2) * (syy / n - (sy / n) ** 2)
    if abs(value) > _ALMOST_ONE or (spread <= 1e-18).any():
        return Ends(value if value < 0 else -np.inf, value if value > 0 else np.inf, None)
    without = np.clip((sxy / n - sx * sy / n**2) / np.sqrt(spread), -_ALMOST_ONE, _ALMOST_ONE)
    at = atanh(value)
    # Leaving document d out moves a mean by -residual_d / (size - size_d): the residual that makes this move.
    residuals = -(np.arctanh(without) - at) * n
    residuals -= sizes * (residuals.sum() / sizes.sum())
    found = ratio_interval(residuals, sizes, confidence=confidence, short_side=_NOT_SHORTER)
    assert found.low is not None and found.high is not None and found.se is not None
    return Ends(tanh(at + found.low), tanh(at + found.high), found.se * (1 - value * value))
