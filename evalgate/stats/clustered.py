"""Means with intervals clustered by document.

The figure is a ratio, sum of values over sum of sizes, since documents differ in length. Its standard error
is the delete-one-document jackknife (CR3; Bell & McCaffrey 2002), with a t reference whose degrees of freedom
are the effective number of documents minus one (Kish 1965: (sum n)^2 / sum n^2). Where the documents' residuals
are skewed, the t interval is widened by Hall's skewness-corrected limits (Hall 1992, J. R. Stat. Soc. B 54):
the interval is the union of both, for KL is skewed and a t interval alone misses on the high side. The plain
linearisation with G-1 degrees of freedom (CR1, kept here for comparison) is too narrow below about 100 documents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Exactness, Figure, Interval
from evalgate.errors import ScoreError, UsageError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

METHOD = "clustered-t"
PLAIN = "clustered-t, CR1"


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


def clustered_mean(
    values: Floats,
    documents: Integers,
    *,
    sizes: Floats | None = None,
    confidence: float = 0.95,
    exactness: Exactness = "exact",
) -> Figure:
    """sum(values) / sum(sizes) with an interval clustered by document; see the module's text.

    values, documents (codes >= 0), sizes (None = 1 each): [n]. Fewer than 2 documents: the interval is unknown.
    Documents without any variation between them give an interval of zero width.

    Raises:
        ScoreError: see `document_sums`.
        UsageError: confidence is not in (0, 1).
    """
    # Shifting by one of the values keeps constant data exactly constant in floating point.
    shift = float(values[0]) if sizes is None and len(values) and np.isfinite(values[0]) else 0.0
    sums = document_sums(values - shift, documents, sizes=sizes)
    found = ratio_interval(sums.totals, sums.sizes, confidence=confidence)
    return replace(
        found, value=found.known + shift, interval=found.interval.moved(shift), n=sums.n, exactness=exactness
    )


def ratio_interval(totals: Floats, sizes: Floats, *, confidence: float = 0.95) -> Figure:
    """sum(totals) / sum(sizes) over documents with its interval. totals, sizes: [G], sum(sizes) > 0.

    The interval is unknown for fewer than 2 documents of a size above 0.

    Raises:
        UsageError: confidence is not in (0, 1).
    """
    check_confidence(confidence)
    size = float(sizes.sum())
    value = float(totals.sum()) / size
    rest = size - sizes
    groups = len(totals)
    if np.count_nonzero(sizes) < 2:
        return Figure(value, Interval(None, None, confidence, METHOD), n=groups, documents=groups)
    residuals = totals - value * sizes
    # Leaving document d out moves the ratio by -residual_d / (size - size_d), exactly.
    moves = residuals / rest
    se = float(np.sqrt((groups - 1) / groups * np.square(moves).sum()))
    if se <= 1e-14 * abs(value):
        se = 0.0
    below, above = reach(confidence, df=effective_df(sizes), skew=skewness(residuals) if se > 0 else 0.0)
    interval = Interval(value - below * se, value + above * se, confidence, METHOD)
    return Figure(value, interval, se, n=groups, documents=groups)


def reach(confidence: float, *, df: float, skew: float) -> tuple[float, float]:
    """How far the interval reaches below and above its figure, in standard errors.

    df: degrees of freedom, one less than the effective number of documents. skew: skewness of their residuals.
    """
    t = t_quantile(confidence, df)
    below, above = _hall(t, skew=skew, documents=df + 1)
    return max(t, below), max(t, above)


def skewness(residuals: Floats) -> float:
    """Third standardised moment about 0 of the documents' residuals [G]; 0 where they are all 0."""
    largest = np.abs(residuals).max()
    if largest == 0:
        return 0.0
    scaled = residuals / largest
    return float((scaled**3).mean() / np.square(scaled).mean() ** 1.5)


def cr1_interval(totals: Floats, sizes: Floats, *, confidence: float = 0.95) -> Figure:
    """The plain linearised interval: variance G/(G-1) sum residual^2 / size^2, t with G-1 degrees of freedom (CR1).

    Kept as the textbook yardstick that the default is compared with.
    """
    check_confidence(confidence)
    size = float(sizes.sum())
    value = float(totals.sum()) / size
    groups = int(np.count_nonzero(sizes))
    if groups < 2:
        return Figure(value, Interval(None, None, confidence, PLAIN), n=groups, documents=groups)
    residuals = totals - value * sizes
    se = float(np.sqrt(groups / (groups - 1) * np.square(residuals).sum())) / size
    t = t_quantile(confidence, groups - 1.0)
    return Figure(value, Interval(value - t * se, value + t * se, confidence, PLAIN), se, n=groups, documents=groups)


def effective_df(sizes: Floats) -> float:
    """(sum n)^2 / sum n^2 - 1, at least 1 and at most G - 1."""
    effective = float(sizes.sum()) ** 2 / float(np.square(sizes).sum())
    return float(np.clip(effective - 1, 1.0, max(len(sizes) - 1.0, 1.0)))


@lru_cache(maxsize=4096)
def t_quantile(confidence: float, df: float) -> float:
    """Two-sided Student quantile: P(|T| <= result) = confidence."""
    from scipy.special import stdtrit

    return float(stdtrit(df, 0.5 + confidence / 2))


def check_confidence(confidence: float) -> None:
    """Raise UsageError unless confidence is in (0, 1)."""
    if not 0 < confidence < 1:
        raise UsageError(f"confidence must be between 0 and 1, not {confidence}", confidence=confidence)


def _hall(t: float, *, skew: float, documents: float) -> tuple[float, float]:
    # Inverse of g(T) = T + a T^2 / 3 + a^2 T^3 / 27 + a / 6 with a = skew / sqrt(documents), at +t and -t:
    # the distances below and above the figure, in standard errors.
    a = skew / documents**0.5
    if abs(a) < 1e-6:
        return t, t

    def inverse(x: float) -> float:
        return float(3 / a * (np.cbrt(1 + a * (x - a / 6)) - 1))

    return inverse(t), -inverse(-t)
