"""The kernel under every mean: a ratio of sums over documents, and how far it can be off.

The figure is sum(totals) / sum(sizes), since documents differ in length. Three things decide its interval:

Spread. The delete-one-document jackknife (CR3; Bell and McCaffrey 2002) assumes nothing about the documents, but where
a few long ones carry the figure it rests on those few. So a second reading pools all of them: a document's mean varies
by tau^2 + sigma^2 / size, both parts found from two moments. The larger of the two is the standard error.

Degrees of freedom. Those of a variance pooled with weights sqrt(size): (sum sqrt(n))^2 / sum n, less one; at least one.

Skew. The side on which the documents' tail lies reaches further, by the first term of the expansion that Johnson (1978)
and Hall (1992) invert: t (1 + c k (1 + 2 z^2) / (6 z)), k the skewness of the figure, z the normal quantile. A sample's
skewness is far too small where documents are few (it cannot exceed sqrt(G)), and Hall's cubic jumps from 3 to 10
standard errors within a hair of it; hence c = 1 + 16 / sqrt(G) and k at most 0.3. The other side reaches less far, with
c = 0.4, and at least half of t. Fewer than 12 documents tell neither how skewed they are nor to which side: both sides
then reach as far, with k at least 0.15. These constants are fitted to simulations: `benchmarks/coverage.py`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evalgate.errors import UsageError

Floats = NDArray[np.float64]

SKEW_BIAS = 16.0  # a sample's skewness counts 1 + SKEW_BIAS / sqrt(documents) times on the side of the tail
MOST_SKEW = 0.3  # of the figure, on that side
SHORT_SIDE = -0.4  # how many times it counts on the other side; negative = nearer
SHORTEST = 0.5  # of Student's t, on the other side
FEW = 12  # fewer documents than this do not show their skewness
LEAST_SKEW = 0.15  # of the figure, on both sides, with so few


class RatioInterval(NamedTuple):
    """value with low, high and se; the last three are None for fewer than 2 documents. df: degrees of freedom."""

    value: float
    low: float | None
    high: float | None
    se: float | None
    df: float | None


def ratio_interval(
    totals: Floats, sizes: Floats, *, confidence: float = 0.95, short_side: float = SHORT_SIDE
) -> RatioInterval:
    """sum(totals) / sum(sizes) over documents with its interval. totals, sizes: [G], sum(sizes) > 0.

    Unknown (None) for fewer than 2 documents of a size above 0. short_side: see the constant.

    Raises:
        UsageError: confidence is not in (0, 1).
    """
    check_confidence(confidence)
    size = float(sizes.sum())
    value = float(totals.sum()) / size
    if np.count_nonzero(sizes) < 2:
        return RatioInterval(value, None, None, None, None)
    residuals = totals - value * sizes
    se = max(_jackknife(residuals, sizes), _pooled(residuals, sizes)) ** 0.5
    if se <= 1e-14 * abs(value):
        se = 0.0
    df = max(effective_number(np.sqrt(sizes)) - 1, 1.0)
    below, above = reach(
        confidence,
        df=df,
        skew=figure_skewness(residuals, sizes) if se > 0 else 0.0,
        documents=len(totals),
        short_side=short_side,
    )
    return RatioInterval(value, value - below * se, value + above * se, se, df)


def reach(
    confidence: float, *, df: float, skew: float, documents: int, short_side: float = SHORT_SIDE
) -> tuple[float, float]:
    """How far the interval reaches below and above its figure, in standard errors.

    df: degrees of freedom of the standard error. skew: skewness of the figure. documents: how many it was read from.
    """
    t, z = t_quantile(confidence, df), _normal_quantile(confidence)
    bend = (1 + 2 * z * z) / (6 * z)
    few = documents < FEW
    counted = min(max(abs(skew), LEAST_SKEW if few else 0.0), MOST_SKEW)
    long = t * (1 + (1 + SKEW_BIAS / documents**0.5) * counted * bend)
    if few:
        return long, long
    short = t * max(1 + short_side * abs(skew) * bend, SHORTEST)
    return (short, long) if skew >= 0 else (long, short)


def effective_number(weights: Floats) -> float:
    """(sum w)^2 / sum w^2 of weights [G] >= 0: how many equal ones would say as much (Kish 1965); between 1 and G."""
    return min(max(float(weights.sum()) ** 2 / float(np.square(weights).sum()), 1.0), float(len(weights)))


def figure_skewness(residuals: Floats, sizes: Floats) -> float:
    """Skewness of the figure, from documents' residuals [G] = totals - value * sizes; 0 where they are all 0.

    The documents' own skewness is read with weights size^2: short documents are noisier, and so more skewed, than the
    long ones that carry the figure.
    """
    largest = np.abs(residuals).max()
    if largest == 0:
        return 0.0
    present = sizes > 0
    e, n = residuals[present] / largest, sizes[present] / sizes.sum()
    squares = float(np.square(n).sum())
    own = float((e**3 / n).sum()) / squares / (float(np.square(e).sum()) / squares) ** 1.5
    return float(own * (n**3).sum() / squares**1.5)


def _jackknife(residuals: Floats, sizes: Floats) -> float:
    """Variance of the figure from leaving each document out in turn."""
    # Leaving document d out moves the ratio by -residual_d / (size - size_d), exactly.
    moves = residuals / (sizes.sum() - sizes)
    return float((len(sizes) - 1) / len(sizes) * np.square(moves).sum())


def _pooled(residuals: Floats, sizes: Floats) -> float:
    """Variance of the figure where document means vary by tau^2 + sigma^2 / size around it, read from all documents."""
    present = sizes > 0
    n, deviations = sizes[present], residuals[present] / sizes[present]
    weights = n / n.sum()
    concentration = float(np.square(weights).sum())

    def moment(by: Floats) -> tuple[float, float]:
        # Weighted mean of squared deviations, unbiased where variances are equal, and the coefficient of sigma^2 in it.
        share = by / by.sum()
        freedom = 1 - 2 * float(share @ weights) + concentration
        return float(share @ np.square(deviations)) / freedom, float((share / n).sum())

    by_size, noise = moment(n)
    by_root, more_noise = moment(np.sqrt(n))
    within = 0.0
    if more_noise > noise * (1 + 1e-9):
        within = min(max((by_root - by_size) / (more_noise - noise), 0.0), by_size / noise)
    return (by_size - within * noise) * concentration + within / float(n.sum())


@lru_cache(maxsize=4096)
def t_quantile(confidence: float, df: float) -> float:
    """Two-sided Student quantile: P(|T| <= result) = confidence."""
    from scipy.special import stdtrit

    return float(stdtrit(df, 0.5 + confidence / 2))


@lru_cache(maxsize=256)
def _normal_quantile(confidence: float) -> float:
    from scipy.special import ndtri

    return float(ndtri(0.5 + confidence / 2))


def check_confidence(confidence: float) -> None:
    """Raise UsageError unless confidence is in (0, 1)."""
    if not 0 < confidence < 1:
        raise UsageError(f"confidence must be between 0 and 1, not {confidence}", confidence=confidence)
