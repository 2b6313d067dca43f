"""One rule on one candidate while documents come in, in random order.

A pass needs what the fixed gate needs, the interval and the bound of clipped documents inside, and the bound is one
that may be looked at after every document. A fail before the last document needs as sure a bound on the other side,
where nothing is cut: it exists where the metric has an end on the good side (0 for KL). Looking early takes half of
the error rate of fails; the other half, or all of it where there is no such end, is kept for the interval of all
documents.

Of a finite corpus (`corpus`) the documents are drawn without replacement, and the figure is known at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Figure, Interval, Verdict
from evalgate.gate.following import Followed
from evalgate.metrics import Scores, Series
from evalgate.stats.betting import METHOD, Bets, bar, log_capital, smallest
from evalgate.stats.clipped import Side, largest_share_so_far
from evalgate.stats.intervals import Sample
from evalgate.stats.rare import RareEvents
from evalgate.stats.scale import scaled

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Gambler:
    """Bets on one side of a rule: `passing` against the mean being beyond the limit, `failing` against it being inside.

    failing: None where the metric has no end on the good side.
    """

    side: Side
    passing: Bets
    failing: Bets | None


@dataclass
class Track:
    """The rule's evidence so far.

    sizes: of all documents that will come. clip: see policy.Settings. corpus: whether they are the population.
    """

    followed: Followed
    sizes: Floats
    clip: float | None
    corpus: bool
    verdict: Verdict = "undecided"
    error: float = 0.05  # the rate of the verdict, both directions together
    totals: list[float] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        total = len(self.sizes) if self.corpus else None
        self.gamblers = [
            Gambler(side, Bets(side.most(self.sizes), total), self._failing(side, total))
            for side in self.followed.sides(len(self.sizes), self.clip)
        ]

    def _failing(self, side: Side, total: int | None) -> Bets | None:
        most = side.slack * float(self.sizes.max())
        return Bets(most, total) if isfinite(most) and most > 0 else None

    @property
    def complete(self) -> bool:
        """Whether every document is seen."""
        return len(self.seen) == len(self.sizes)

    def add(self, scores: Scores) -> None:
        """Take in one document; nothing more once the verdict has fallen, which speaks of those before."""
        if self.verdict == "undecided":
            values = self.followed.values(scores)
            self.take(float(values.sum()), float(len(values)))

    def take(self, total: float, size: float) -> None:
        """Take in one document by its sum and its number of values."""
        self.totals.append(total)
        self.seen.append(size)
        for one in self.gamblers:
            (loss,) = one.side.losses(np.array(self.totals[-1:]), np.array(self.seen[-1:]))
            one.passing.add(float(loss))
            if one.failing is not None:
                one.failing.add(-float(loss))

    def passes(self, error: float) -> bool:
        """Whether it passes, wrongly with at most the chance error / 2."""
        if self.corpus and self.complete:
            return self.followed.limits.verdict(self.known.interval) == "pass"
        if any(one.passing.peak < bar(error / 2) for one in self.gamblers):
            return False
        return self.followed.limits.verdict(self.fixed(error).interval) == "pass"

    def fails(self, error: float) -> bool:
        """Whether it fails, wrongly with at most the chance error / 2."""
        if self.corpus and self.complete:
            return self.followed.limits.verdict(self.known.interval) == "fail"
        early = [one.failing for one in self.gamblers if one.failing is not None]
        looks = error / 2 if self.corpus else error / 4
        if any(bets.peak >= bar(looks) for bets in early):
            return True
        last = error / 2 if early else error
        return self.complete and self.followed.limits.verdict(self.fixed(last).interval) == "fail"

    def settle(self, verdict: Verdict, error: float) -> None:
        """Keep a verdict, and the error rate at which it fell."""
        self.verdict, self.error = verdict, error

    def fixed(self, error: float) -> Figure:
        """The figure with the interval of a run that ends here."""
        series = Series(np.array(self.totals), sizes=np.array(self.seen))
        sample = Sample(series, np.arange(len(self.seen)), support=self.followed.support)
        rare = RareEvents(self.followed.limits, self.clip)
        return sample.figure(self.followed.statistic, confidence=1 - error, rare=rare)

    @property
    def known(self) -> Figure:
        """The figure of the documents seen, as if they were all there are."""
        mean = sum(self.totals) / sum(self.seen)
        exactly = Figure(mean, Interval(mean, mean, 1.0, "all documents"))
        return scaled(exactly, self.followed.statistic.scale, support=self.followed.support)

    @property
    def figure(self) -> Figure:
        """The figure with its interval so far; of a fail before the last document, the end that the bets give."""
        if self.corpus and self.complete:
            return self.known
        if self.verdict == "fail" and not self._failed_early:
            return self.fixed(self.error / 2 if self._can_fail_early else self.error)
        fixed = self.fixed(self.error)
        ends = {-1: fixed.low, 1: fixed.high}
        for one in self.gamblers:
            if one.failing is not None and one.failing.peak >= bar(self._looks):
                ends[-one.side.sign] = self._inside(one)
        method = f"{fixed.interval.method}, {METHOD}" if self._failed_early else fixed.interval.method
        interval = Interval(ends[-1], ends[1], 1 - self.error, method, fixed.interval.label)
        return replace(fixed, interval=interval, documents=len(self.seen))

    def reservation(self) -> str:
        """What a pass does not speak of."""
        if self.corpus and self.complete:
            return ""
        totals, sizes = np.array(self.totals), np.array(self.seen)
        said = []
        for one in self.gamblers:
            if one.side.cuts(self.sizes):
                beyond = one.side.losses(totals, sizes) > one.passing.most * (1 + 1e-9)
                end = one.side.limit + one.side.sign * one.side.reach
                said.append(
                    f"a document of average length counts as at {'most' if one.side.sign == 1 else 'least'} "
                    f"{self._shown(end):.4g} ({int(beyond.sum())} cut, at most "
                    f"{largest_share_so_far(beyond, error=self.error / 2):.1%} of documents)"
                )
        return "; ".join(said)

    @property
    def _looks(self) -> float:
        """The error rate of a fail before the last document."""
        return self.error / 2 if self.corpus else self.error / 4

    @property
    def _can_fail_early(self) -> bool:
        return any(one.failing is not None for one in self.gamblers)

    @property
    def _failed_early(self) -> bool:
        return any(one.failing is not None and one.failing.peak >= bar(self._looks) for one in self.gamblers)

    def _inside(self, one: Gambler) -> float:
        """The end on the other side, up to which the bets against a fail rule everything out."""
        totals, sizes = np.array(self.totals), np.array(self.seen)
        edge, longest = one.side.sign * one.side.limit - one.side.slack, float(self.sizes.max())

        def beaten(x: float) -> bool:
            at = -x  # in the direction of the limit
            if at <= edge:
                return True
            losses = -one.side.losses(totals, sizes, at=one.side.sign * at)
            total = len(self.sizes) if self.corpus else None
            capital = log_capital(losses, most=(at - edge) * longest, total=total)
            return bool(capital.max() >= bar(self._looks))

        value = one.side.sign * float(totals.sum() / sizes.sum())
        return self._shown(-one.side.sign * smallest(beaten, start=-value, step=max(abs(value - edge), 1e-9)))

    def _shown(self, mean: float) -> float:
        exactly = Figure(mean, Interval(None, None))
        return scaled(exactly, self.followed.statistic.scale, support=self.followed.support).known
