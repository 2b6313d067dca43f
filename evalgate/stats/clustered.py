"""Means with intervals over documents: the one interval that summary, slices, compare, verify and gate share.

`ratio` gives the interval where documents differ. Where fewer than five do, a spread would be read from nothing, and
the interval is widened by a bound that needs none (`rare`): to the end of the metric's range, or open where it has no
end. Where there is one document, the interval is over stretches of it (`units`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Exactness, Figure, Interval
from evalgate.errors import ScoreError
from evalgate.stats import rare
from evalgate.stats.ratio import check_confidence, ratio_interval
from evalgate.stats.units import WITHIN_TEXT, Units, Windows

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

METHOD = "clustered-t"


@dataclass(frozen=True)
class DocumentSums:
    """Per document: totals [G] = sum of values, sizes [G] = sum of denominators; n = number of values."""

    totals: Floats
    sizes: Floats
    n: int


def document_sums(values: Floats, documents: Integers, *, sizes: Floats | None = None) -> DocumentSums:
    """Add values (and sizes, 1 each if None) up by document. values, documents, sizes: [n]; documents are codes >= 0.

    Raises:
        ScoreError: nothing to add up, unequal lengths, a non-finite value, a negative size or no size at all.
    """
    n = len(values)
    if n == 0:
        raise ScoreError("there are no scored positions to average: widen the selection")
    if len(documents) != n or (sizes is not None and len(sizes) != n):
        raise ScoreError(f"{n} values came with {len(documents)} document codes: they must be the same positions")
    if not np.isfinite(values).all():
        raise ScoreError(f"value {int(np.argmin(np.isfinite(values)))} of {n} is not finite: score again")
    counts = np.bincount(documents)
    present = counts > 0
    totals = _by_document(values, documents)[present]
    if sizes is None:
        return DocumentSums(totals, counts[present].astype(np.float64), n)
    if not np.isfinite(sizes).all() or (sizes < 0).any() or sizes.sum() <= 0:
        raise ScoreError("the sizes to divide by must be finite, not negative, and not all zero")
    return DocumentSums(totals, _by_document(sizes, documents)[present], n)


def _by_document(values: Floats, documents: Integers) -> Floats:
    return np.asarray(np.bincount(documents, weights=values), dtype=np.float64)


@dataclass(frozen=True)
class Ends:
    """Ends of an interval over one kind of unit; infinite = open. se: None where an open end leaves it unknown.

    alike: whether the units show no spread.
    """

    low: float
    high: float
    se: float | None
    alike: bool = False


def clustered_mean(
    values: Floats,
    documents: Integers,
    *,
    sizes: Floats | None = None,
    windows: Windows | None = None,
    reach: rare.Range = rare.UNBOUNDED,
    confidence: float = 0.95,
    exactness: Exactness = "exact",
) -> Figure:
    """sum(values) / sum(sizes) with an interval over documents; see the module's text.

    values, documents (codes >= 0), sizes (None = 1 each), windows (in the order of the text): [n]. reach: how far one
    document's mean can be from the others. With fewer than 2 documents the interval is unknown, unless windows are
    given and there are enough of them.

    Raises:
        ScoreError: see `document_sums`.
        UsageError: confidence is not in (0, 1).
    """
    check_confidence(confidence)
    # Shifting by one of the values keeps constant data exactly constant in floating point.
    shift = float(values[0]) if sizes is None and len(values) and np.isfinite(values[0]) else 0.0
    whole = document_sums(values - shift, documents, sizes=sizes)
    value = float(whole.totals.sum()) / float(whole.sizes.sum()) + shift
    units = Units.of(documents, windows)
    found = []
    for codes in units.codes:
        sums = whole if codes is documents else document_sums(values - shift, codes, sizes=sizes)
        if np.count_nonzero(sums.sizes) >= 2:
            found.append(mean_ends(sums, reach, confidence=confidence, shift=shift))
    return figure(value, found, units, n=whole.n, method=METHOD, confidence=confidence, exactness=exactness)


def mean_ends(sums: DocumentSums, reach: rare.Range, *, confidence: float, shift: float = 0.0) -> Ends:
    """The ends of a mean over at least 2 documents of a size above 0. `shift` was taken from every value."""
    spread = ratio_interval(sums.totals, sums.sizes, confidence=confidence)
    assert spread.low is not None and spread.high is not None and spread.se is not None
    value, low, high = spread.value + shift, spread.low + shift, spread.high + shift
    group = rare.alike(sums.totals, sums.sizes)
    if group is not None:
        below, above = reach.room(group.value + shift)
        far = rare.alike_interval(group, below=below, above=above, confidence=confidence)
        low, high = min(low, far[0] + shift), max(high, far[1] + shift)
    # Rounding may leave the figure itself a hair outside its range; the interval still holds it.
    low, high = min(max(low, reach.support[0]), value), max(min(high, reach.support[1]), value)
    return Ends(low, high, spread.se, group is not None)


def figure(
    value: float,
    found: Sequence[Ends],
    units: Units,
    *,
    n: int,
    method: str,
    confidence: float,
    exactness: Exactness,
) -> Figure:
    """A figure with the union of its intervals over every kind of unit; unknown where there is none."""
    if not found:
        unknown = Interval(None, None, confidence)
        return Figure(value, unknown, None, n=n, documents=units.documents, exactness=exactness)
    low, high = min(ends.low for ends in found), max(ends.high for ends in found)
    alike = any(ends.alike for ends in found)
    interval = Interval(
        low if isfinite(low) else None,
        high if isfinite(high) else None,
        confidence,
        f"{method}, {rare.METHOD}" if alike else method,
        WITHIN_TEXT if units.within_text else "",
    )
    errors = [ends.se for ends in found if ends.se is not None]
    se = max(errors) if len(errors) == len(found) else None
    return Figure(value, interval, se, n=n, documents=units.documents, exactness=exactness, alike=alike)
