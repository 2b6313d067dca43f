"""Bets against a mean: evidence from bounded losses that holds for any distribution and however often one looks.

A gambler starts with 1 and bets against "the mean loss is 0 or more". Its capital can only grow in expectation where
that is false, so a capital of 1 / error has at most the chance `error` if it is true, at whichever moment one looks
(Ville 1939; Waudby-Smith and Ramdas 2023, "Estimating means of bounded random variables by betting", J. R. Stat. Soc.
B 86). Three bets of fixed size are averaged, which needs no estimate of the spread and no order of the documents.

A loss is what one document adds to a total: its positions times its distance to the limit. Long documents therefore
count by their length, and the mean is that over positions (Shekhar, Xu, Lipton, Liang and Ramdas 2023, "Risk-limiting
financial audits via weighted sampling without replacement"). Where the corpus is finite and drawn without replacement,
the mean of the documents that are left takes the place of 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, isfinite, log

import numpy as np
from numpy.typing import NDArray

from evalgate.errors import ScoreError, UsageError

Floats = NDArray[np.float64]

METHOD = "betting"
# Shares of the largest bet that cannot lose everything, and how the first capital is divided among them. Large bets
# have most: they decide where documents are few. Simulated in benchmarks/gate.py.
_BETS = np.array([0.25, 0.6, 0.95])
_CAPITAL = np.array([1 / 6, 1 / 3, 1 / 2])
_HAIR = 1e-9  # of the largest loss: what rounding may make of nothing


def log_capital(losses: Floats, *, most: float, total: int | None = None) -> Floats:
    """Log of the capital after each of the losses [n], in order; a loss above `most` counts as `most`.

    total: documents of a finite corpus of which these are drawn at random, and against whose mean loss is bet; None =
    an endless one. The last value is the same in any order if total is None.

    Raises:
        UsageError: `most` is not a positive number, or total is below n.
    """
    _check(most)
    cut = np.minimum(losses, most)
    if total is None:
        gained = -cut / most
    else:
        if total < len(losses):
            raise UsageError(f"a corpus of {total} documents does not hold {len(losses)}", total=total)
        # What the mean loss of the documents left would be if that of the whole corpus were 0.
        expected = -(np.cumsum(cut) - cut) / (total - np.arange(len(cut)))
        room = most - expected
        with np.errstate(divide="ignore", invalid="ignore"):
            gained = np.where(room > _HAIR * most, (most - cut) / room - 1, 0.0)
        gained[room < -_HAIR * most] = inf  # the documents left cannot make up for those seen
    return np.asarray(_averaged(np.cumsum(np.log1p(_BETS[:, None] * gained), axis=1)))


@dataclass
class Bets:
    """The same bets, document by document.

    most: the largest loss. total: documents of a finite corpus, whose mean loss is bet against; None = an endless one.
    """

    most: float
    total: int | None = None
    seen: int = 0
    log: float = 0.0  # of the capital now
    peak: float = 0.0  # and at its highest, by which one may judge at any time
    _sum: float = 0.0
    _grown: Floats = field(default_factory=lambda: np.zeros(len(_BETS)))

    def __post_init__(self) -> None:
        _check(self.most)

    def add(self, loss: float) -> None:
        """Take in one document's loss; above `most` it counts as `most`.

        Raises:
            ScoreError: it is not a number, or the corpus has no more documents.
        """
        if not isfinite(loss):
            raise ScoreError(f"a document's loss must be a number, not {loss}")
        if self.total is not None and self.seen >= self.total:
            raise ScoreError(f"the corpus was said to have {self.total} documents, and here is one more")
        loss = min(loss, self.most)
        expected = 0.0 if self.total is None else -self._sum / (self.total - self.seen)
        room = self.most - expected
        if room > _HAIR * self.most:
            self._grown += np.log1p(_BETS * ((self.most - loss) / room - 1))
        elif room < -_HAIR * self.most:
            self._grown += inf
        self.seen += 1
        self._sum += loss
        self.log = float(_averaged(self._grown))
        self.peak = max(self.peak, self.log)


def bar(error: float) -> float:
    """Log of the capital that is reached with at most the chance `error` (in (0, 1)) where the mean is 0 or more."""
    if not 0 < error < 1:
        raise UsageError(f"an error rate must be between 0 and 1, not {error}", error=error)
    return -log(error)


def smallest(beaten: Callable[[float], bool], *, start: float, step: float) -> float:
    """The smallest x >= start for which `beaten` holds, a hair above it by rounding; it holds from there on.

    step: > 0, how far to look first. inf where it holds nowhere within 2^60 steps.
    """
    if beaten(start):
        return start
    low, high = start, start + step
    for _ in range(60):
        if beaten(high):
            break
        low, step = high, step * 2
        high = low + step
    else:
        return inf
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if beaten(middle) else (middle, high)
    return high


def _averaged(grown: Floats) -> Floats:
    """Log of the mean capital of the bets: grown [3, ...] -> [...]."""
    top = grown.max(axis=0)
    with np.errstate(invalid="ignore"):
        mean = top + np.log(np.tensordot(_CAPITAL, np.exp(grown - top), axes=1))
    return np.asarray(np.where(np.isposinf(top), inf, mean))


def _check(most: float) -> None:
    if not (isfinite(most) and most > 0):
        raise UsageError(f"the largest loss must be a positive number, not {most}", most=most)
