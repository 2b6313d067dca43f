"""Limits on a mean whose documents count only so far beyond them: what a pass rests on.

No interval for a mean holds whatever the tails: one document in a thousand may carry it, and a sample need not have
any (Bahadur and Savage 1956). So a document's loss (its total minus the limit times its size) counts as at most
`reach` times the average size. For the mean of such losses bets (`betting`) give a bound that holds for every
distribution; what lies beyond the reach is counted, and the share of such documents is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from evalgate.stats.betting import bar, log_capital, smallest

Floats = NDArray[np.float64]

FEW = 24  # documents from which a pass is within reach
# Distances from the ideal to the limit that a document counts at most with up to FEW documents: what they can show.
MEANS, SHARES = 3.0, 4.0


def default_clip(documents: int, *, share: bool = False) -> float:
    """How many distances a document counts at most where the policy does not say: 3 with up to 24 documents.

    It grows as the fourth root of their number, so that more documents also show more of the tail: 4.3 with 100, 6 with
    400. share: of positions beyond a percentile's limit, which gather in fewer documents: 4, 5.7 and 8.
    """
    return float((SHARES if share else MEANS) * (max(documents, FEW) / FEW) ** 0.25)


@dataclass(frozen=True)
class Side:
    """A limit on one side of a mean.

    sign: 1 = the mean is to be at most `limit`, -1 = at least. reach: how far beyond it an average document counts.
    room: how far beyond it a mean can be at all; inf = any distance. slack: how far inside it, likewise.
    """

    limit: float
    sign: int
    reach: float
    room: float = inf
    slack: float = inf

    def losses(self, totals: Floats, sizes: Floats, *, at: float | None = None) -> Floats:
        """How far each document is beyond the limit, or beyond `at`: totals, sizes [G] -> [G], negative inside."""
        return self.sign * (totals - (self.limit if at is None else at) * sizes)

    def most(self, sizes: Floats) -> float:
        """The largest loss that counts among documents of these sizes [G]."""
        reach = self.reach * float(sizes.mean())
        return min(reach, self.room * float(sizes.max())) if isfinite(self.room) else reach

    def cuts(self, sizes: Floats) -> bool:
        """Whether one of these documents could be cut at all."""
        return self.room * float(sizes.max()) > self.most(sizes) * (1 + 1e-9)

    def beaten(self, totals: Floats, sizes: Floats, *, error: float) -> bool:
        """Whether the clipped mean is inside the limit, which is wrongly so with at most the chance `error`."""
        most = self.most(sizes)
        return most > 0 and self._wins(self.sign * self.limit, totals, sizes, most=most, error=error)

    def bound(self, totals: Floats, sizes: Floats, *, error: float) -> float:
        """The least extreme mean that is ruled out in the same way; infinite where none is."""
        most = self.most(sizes)
        if not most > 0:
            return self.sign * inf
        start = self.sign * float(totals.sum() / sizes.sum())
        step = most / float(sizes.mean())
        return self.sign * smallest(
            lambda x: self._wins(x, totals, sizes, most=most, error=error), start=start, step=step
        )

    def _wins(self, x: float, totals: Floats, sizes: Floats, *, most: float, error: float) -> bool:
        return bool(log_capital(self.losses(totals, sizes, at=self.sign * x), most=most)[-1] >= bar(error))

    def cut(self, totals: Floats, sizes: Floats) -> int:
        """How many documents are beyond the reach."""
        return int(np.count_nonzero(self.losses(totals, sizes) > self.most(sizes) * (1 + 1e-9)))


def sides(
    low: float | None,
    high: float | None,
    *,
    ideal: float,
    clip: float,
    support: tuple[float, float],
    spread: float = 0.0,
) -> tuple[Side, ...]:
    """The sides of a mean that is to stay in [low, high]; None = no limit there.

    ideal: the value of a candidate that is its reference. A document counts as at most `clip` distances from the ideal
    to the limit; with two limits, half the distance between them from their middle. spread: the distance to take where
    the limit is the ideal itself.
    """
    found = []
    for limit, other, sign in ((high, low, 1), (low, high, -1)):
        if limit is None:
            continue
        distance = (abs(limit - ideal) if other is None else abs(limit - other) / 2) or spread
        beyond, inside = (support[1], support[0]) if sign == 1 else support
        found.append(
            Side(
                limit,
                sign,
                reach=(clip - 1) * distance,
                room=sign * (beyond - limit),
                slack=sign * (limit - inside),
            )
        )
    return tuple(found)


def largest_share(count: int, documents: int, *, error: float) -> float:
    """Upper limit of a share of documents of which `count` were seen (Clopper and Pearson 1934)."""
    from scipy.special import betaincinv

    return 1.0 if count >= documents else float(betaincinv(count + 1, documents - count, 1 - error))


def largest_share_so_far(beyond: NDArray[np.bool_], *, error: float) -> float:
    """The same from documents in random order, [n] whether each is one of them, however often one looks."""
    seen = beyond.astype(np.float64)

    def beaten(share: float) -> bool:
        return share >= 1 or bool(log_capital(seen - share, most=1 - share).max() >= bar(error))

    return min(smallest(beaten, start=float(seen.mean()), step=0.1), 1.0)
