"""McNemar's test on paired yes/no outcomes, plain and with documents as the unit.

The exact test (McNemar 1947; binomial on the discordant pairs) takes every position as its own draw, which text is
not: positions of one document go wrong together. The clustered test flips the sign of whole documents' differences:
under the hypothesis that the two sides are exchangeable within each document, every pattern of signs is as likely.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Figure
from evalgate.errors import MismatchError, UsageError
from evalgate.stats.clustered import clustered_mean
from evalgate.stats.rare import Range

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_ENUMERATE_UP_TO = 14  # documents with a difference: 2^14 sign patterns are tried one and all
_CHUNK_CELLS = 1 << 22


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
    difference = clustered_mean(change, documents, reach=Range((-1.0, 1.0)), confidence=confidence)
    b, c = int((first & ~second).sum()), int((second & ~first).sum())
    totals = np.asarray(np.bincount(documents, weights=change), dtype=np.float64)
    return McNemar(b, c, exact_p(b, c), sign_flip_p(totals, seed=seed, flips=flips), difference)


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
