"""Betting confidence sequence: an interval for the mean that stays valid however often one looks.

Hedged capital with predictable plug-in bets (Waudby-Smith & Ramdas 2023, "Estimating means of bounded random variables
by betting", J. R. Stat. Soc. B 86, sections 4 and 5). For every candidate mean m two gamblers bet, one that the
documents lie above m and one that they lie below; m is ruled out once either has made 2 / (1 - confidence) from 1.
With a finite corpus the documents are drawn without replacement: m is compared with the mean of those left.

One observation is one document's mean, cut to [0, clip]; every document counts once, whatever its length.
Documents must come in random order (shuffle them with the run's seed).
"""

from __future__ import annotations

from math import isfinite, log, sqrt

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Interval
from evalgate.errors import ScoreError, UsageError
from evalgate.stats.ratio import check_confidence

Floats = NDArray[np.float64]

METHOD = "betting sequence"

_CAP = 0.5  # largest share of its capital that a gambler can lose on one document


def _grid() -> Floats:
    # Candidate means as a share of clip: even steps, and even ratios for means far below clip.
    return np.unique(np.concatenate([np.linspace(0, 1, 1001), np.geomspace(1e-5, 1, 1001)]))


class BettingSequence:
    """The running confidence sequence; `add` one document at a time and read the interval.

    clip: largest document mean that counts in full. total: number of documents in the corpus, None = endless.
    seen: documents so far, of which `clipped` were cut to clip.

    The interval is that of the mean of the clipped values, which is at most the true one. So a fail stands as it is,
    and a pass with clipped > 0 speaks of the clipped mean only. Where the caller also raised values to 0, neither end
    bounds the true mean.
    """

    def __init__(self, *, clip: float, confidence: float = 0.95, total: int | None = None) -> None:
        check_confidence(confidence)
        if not (isfinite(clip) and clip > 0):
            raise UsageError(f"clip must be a positive number, not {clip}", clip=clip)
        if total is not None and total < 1:
            raise UsageError(f"the corpus must have at least 1 document, not {total}", total=total)
        self.clip, self.confidence, self.total = clip, confidence, total
        self._means = _grid()
        self._above = np.zeros_like(self._means)  # log capital of the gambler who bets that the mean is above m
        self._below = np.zeros_like(self._means)
        self._low, self._high = 0.0, 1.0
        self.seen, self.clipped = 0, 0
        self._sum, self._square = 0.0, 0.0  # of observations, and of their distances to the running mean

    @property
    def interval(self) -> Interval:
        """The interval so far, in the unit of the observations; it never widens."""
        return Interval(self._low * self.clip, self._high * self.clip, self.confidence, METHOD)

    def add(self, mean: float) -> Interval:
        """Take in one document's mean.

        Raises:
            ScoreError: it is negative or not finite, the corpus has no more documents, or no mean fits all documents.
        """
        if not (isfinite(mean) and mean >= 0):
            raise ScoreError(f"a document's mean must be finite and not negative, not {mean}", mean=mean)
        if self.total is not None and self.seen >= self.total:
            raise ScoreError(f"the corpus was said to have {self.total} documents, and here is one more")
        self.clipped += mean > self.clip
        x = min(mean / self.clip, 1.0)
        self._bet(x)
        self.seen += 1
        self._sum += x
        self._square += (x - (0.5 + self._sum) / (self.seen + 1)) ** 2
        self._narrow()
        return self.interval

    def _bet(self, x: float) -> None:
        # Everything that sets the bet is known before x: variance and mean of the documents seen so far.
        t = self.seen + 1
        variance = (0.25 + self._square) / t
        bet = sqrt(2 * log(2 / (1 - self.confidence)) / (variance * t * log(1 + t)))
        m = self._means if self.total is None else (self.total * self._means - self._sum) / (self.total - self.seen)
        # A mean that the documents left cannot make up for is ruled out at once by `_narrow`.
        m = np.clip(m, 0.0, 1.0)
        with np.errstate(divide="ignore"):
            self._above += np.log1p(np.minimum(bet, _CAP / m) * (x - m))
            self._below += np.log1p(-np.minimum(bet, _CAP / (1 - m)) * (x - m))

    def _narrow(self) -> None:
        # Grid points that are ruled out bound the interval, so that its ends err on the safe side by one step.
        bar = log(2 / (1 - self.confidence))
        beaten = np.flatnonzero(self._above >= bar)
        if len(beaten):
            self._low = max(self._low, float(self._means[beaten[-1]]))
        beaten = np.flatnonzero(self._below >= bar)
        if len(beaten):
            self._high = min(self._high, float(self._means[beaten[0]]))
        if self._low > self._high:
            raise ScoreError("no mean fits all documents so far: bring the documents in random order")
        if self.total is not None:
            # What the documents left can still do is certain, and goes before what the gamblers made likely.
            least = self._sum / self.total
            most = max(least, (self._sum + self.total - self.seen) / self.total)
            self._low = min(max(self._low, least), most)
            self._high = max(min(self._high, most), least)
