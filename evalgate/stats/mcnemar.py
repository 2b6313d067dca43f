"""McNemar's test on paired yes/no outcomes, plain and with documents as the unit.

The exact test (McNemar 1947; binomial on the discordant pairs) takes every position as its own draw, which text is
not: positions of one document go wrong together. The clustered p-value is the larger of two. The first flips the signs
of whole documents' differences: where the two sides are exchangeable within each document, every pattern of signs is
as likely, and the test is exact. Sides with the same mean need not be exchangeable: one may err in a few documents, the
other everywhere, and flips alone then reject up to 12 % of the time at the 5 % level. So the second is the error rate
at which the interval of the difference, corrected for skew and for unequal lengths, just holds 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Figure, Limits
from evalgate.errors import MismatchError, UsageError
from evalgate.metrics import Series, Statistic
from evalgate.stats.intervals import Sample
from evalgate.stats.rare import RareEvents

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_ENUMERATE_UP_TO = 14  # documents with a difference: 2^14 sign patterns are tried one and all
_CHUNK_CELLS = 1 << 22
_LEAST_P = 1e-9
_MEAN = Statistic("mean")


@dataclass(frozen=True)
class McNemar:
    """only_first, only_second: positions where one side alone says yes. p-values are two-sided.

    difference: share of yes on the first side minus that on the second, clustered by document.
    """

    only_first: int
    only_second: int
    exact_p: float
    clustered_p: float
    difference: Figure


def mcnemar(
    first: Bools,
    second: Bools,
    *,
    documents: Integers,
    seed: int,
    flips: int = 9999,
    confidence: float = 0.95,
) -> McNemar:
    """Compare two sides' yes/no outcomes [n] on the same positions; documents [n] are codes >= 0.

    flips: random sign patterns tried when more than 14 documents differ; the p-value is then
    (1 + hits) / (1 + flips).

    Raises:
        MismatchError: lengths differ. UsageError: flips < 1. ScoreError: no positions.
    """
    if not len(first) == len(second) == len(documents):
        raise MismatchError(f"the sides have {len(first)} and {len(second)} positions: score both on the same windows")
    if flips < 1:
        raise UsageError(f"a sign-flip test needs at least 1 flip, not {flips}")
    change = first.astype(np.float64) - second.astype(np.float64)
    sample = Sample(Series(change), documents, support=(-1.0, 1.0))
    difference = sample.figure(_MEAN, confidence=confidence)
    b, c = int((first & ~second).sum()), int((second & ~first).sum())
    totals = np.asarray(np.bincount(documents, weights=change), dtype=np.float64)
    flipped = sign_flip_p(totals, seed=seed, flips=flips)
    return McNemar(b, c, exact_p(b, c), max(flipped, _interval_p(sample)), difference)


def exact_p(only_first: int, only_second: int) -> float:
    """Two-sided exact McNemar p-value: min(1, 2 P(Binomial(b + c, 1/2) <= min(b, c))); 1 without discordant pairs."""
    from scipy.special import bdtr

    discordant = only_first + only_second
    if not discordant:
        return 1.0
    return min(1.0, 2 * float(bdtr(min(only_first, only_second), discordant, 0.5)))


def sign_flip_p(totals: Floats, *, seed: int, flips: int = 9999) -> float:
    """Two-sided p-value for sum(totals) = 0 when each document's total is symmetric about 0; totals [G]."""
    totals = totals[totals != 0]
    if not len(totals):
        return 1.0
    # Ties with the observed sum count as hits, whatever the order of addition.
    observed = abs(float(totals.sum())) - 1e-9 * float(np.abs(totals).sum())
    if len(totals) <= _ENUMERATE_UP_TO:
        patterns = np.arange(1 << len(totals))[:, None] >> np.arange(len(totals)) & 1
        return float((np.abs((2 * patterns - 1) @ totals) >= observed).mean())
    rng = np.random.default_rng(seed)
    rows = max(1, _CHUNK_CELLS // len(totals))
    hits = 0
    for start in range(0, flips, rows):
        signs = 2 * rng.integers(0, 2, size=(min(rows, flips - start), len(totals)), dtype=np.int8) - 1
        hits += int((np.abs(signs @ totals) >= observed).sum())
    return (1 + hits) / (1 + flips)


def _interval_p(sample: Sample) -> float:
    """The error rate at which the interval of the sample's mean just holds 0: 1 for fewer than 2 documents."""

    def holds(p: float) -> bool:
        found = sample.figure(_MEAN, confidence=1 - p, rare=RareEvents(Limits(0.0, 0.0)))
        return found.low is None or found.high is None or found.low <= 0 <= found.high

    low, high = _LEAST_P, 1.0
    if not holds(low):
        return low
    if holds(1 - 1e-9):
        return 1.0
    while high > low * 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return high
