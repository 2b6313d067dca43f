"""What limits are held against: a figure between bounds, one over its noise floor, a percentile beside a baseline's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from evalgate.core import Figure, Interval, Limits, Verdict
from evalgate.metrics import Statistic
from evalgate.stats.clipped import Side, default_clip, largest_share
from evalgate.stats.clustered import DocumentSums
from evalgate.stats.estimated import sampling_error
from evalgate.stats.excess import Better, at_confidence, excess
from evalgate.stats.intervals import Sample
from evalgate.stats.paired_percentile import METHOD as PAIRED
from evalgate.stats.paired_percentile import PairedPercentile
from evalgate.stats.ratio import t_quantile
from evalgate.stats.scale import scaled

WHOLE = "all documents"
_NORMAL = 1e6  # degrees of freedom at which Student's quantile is the normal one


class Measure(Protocol):
    """A figure that limits can be held against."""

    def figure(self, limits: Limits, *, confidence: float) -> Figure:
        """It with its interval at a confidence in (0, 1); the limits only matter where the documents are alike."""

    def settled(self, limits: Limits, *, confidence: float) -> bool:
        """Whether a pass at these limits holds whatever the documents' tails, so far as each counts."""

    def reservation(self, limits: Limits, *, confidence: float) -> str:
        """How far each document counts, and what that leaves open, as a clause; empty where that is nothing."""


def verdict_of(measure: Measure, limits: Limits, figure: Figure) -> Verdict:
    """The verdict that a measure's figure gives: a pass also has to be settled."""
    verdict = limits.verdict(figure.interval)
    if verdict == "pass" and not measure.settled(limits, confidence=figure.interval.confidence):
        return "undecided"
    return verdict


@dataclass(frozen=True)
class Known:
    """A statistic of a population that is the sample itself: only its values' own errors leave anything open."""

    sample: Sample
    statistic: Statistic

    def figure(self, limits: Limits, *, confidence: float) -> Figure:
        """The statistic, from its value to its value where its values are exact."""
        found = self.sample.figure(self.statistic, confidence=confidence)
        return replace(found, interval=Interval(*self._ends(found, confidence), confidence, WHOLE), se=None)

    def settled(self, limits: Limits, *, confidence: float) -> bool:
        """Always: every document is seen."""
        return True

    def reservation(self, limits: Limits, *, confidence: float) -> str:
        """Nothing."""
        return ""

    def _ends(self, found: Figure, confidence: float) -> tuple[float | None, float | None]:
        series, se = self.sample.series, self.sample.series.se
        if se is None:
            return found.value, found.value
        if self.statistic.kind == "percentile":
            low, high = (replace(self.sample, series=replace(series, values=series.values + s * se)) for s in (-1, 1))
            return low.figure(self.statistic).value, high.figure(self.statistic).value
        reach = t_quantile(confidence, _NORMAL) * sampling_error(se)
        mean = float(series.values.sum()) / (len(series.values) if series.sizes is None else float(series.sizes.sum()))
        mean += series.below
        ends = scaled(
            Figure(mean, Interval(mean - reach, mean + reach)), self.statistic.scale, support=self.sample.support
        )
        return ends.low, ends.high


@dataclass(frozen=True)
class Bounded:
    """A figure known only between two others; `high` None = it has no upper bound."""

    low: Measure
    high: Measure | None

    def figure(self, limits: Limits, *, confidence: float) -> Figure:
        """From the low end of the lower bound to the high end of the upper one."""
        low = self.low.figure(limits, confidence=confidence)
        high = None if self.high is None else self.high.figure(limits, confidence=confidence)
        return replace(low.between(low.low, None if high is None else high.high), value=None, se=None)

    def settled(self, limits: Limits, *, confidence: float) -> bool:
        """Whether the bound that faces each limit is settled."""
        upper = self.high is None or self.high.settled(Limits(None, limits.high), confidence=confidence)
        return upper and self.low.settled(Limits(limits.low, None), confidence=confidence)

    def reservation(self, limits: Limits, *, confidence: float) -> str:
        """That of the bound that faces each limit."""
        upper = "" if self.high is None else self.high.reservation(Limits(None, limits.high), confidence=confidence)
        lower = self.low.reservation(Limits(limits.low, None), confidence=confidence)
        return "; ".join(said for said in (lower, upper) if said)


@dataclass(frozen=True)
class Excess:
    """How far a figure is worse than its noise floor, whose own interval counts: each gets half the error rate."""

    own: Measure
    floor: Figure
    better: Better
    support: tuple[float, float]

    def figure(self, limits: Limits, *, confidence: float) -> Figure:
        """Positive = worse than the floor."""
        each = (1 + confidence) / 2
        own = self.own.figure(self._on_figure(limits.high), confidence=each)
        found = excess(own, at_confidence(self.floor, each), self.better, support=self.support)
        return replace(found, interval=replace(found.interval, confidence=confidence))

    def settled(self, limits: Limits, *, confidence: float) -> bool:
        """Whether the figure is settled at the limit that the floor's interval leaves it."""
        return self.own.settled(self._surely(limits.high, confidence), confidence=(1 + confidence) / 2)

    def reservation(self, limits: Limits, *, confidence: float) -> str:
        """That of the figure itself."""
        return self.own.reservation(self._surely(limits.high, confidence), confidence=(1 + confidence) / 2)

    def _surely(self, most: float | None, confidence: float) -> Limits:
        """The limit on the figure itself that keeps the excess at `most` wherever the floor lies in its interval."""
        floor = at_confidence(self.floor, (1 + confidence) / 2)
        zero = Figure(0.0, Interval(0.0, 0.0))
        gained = excess(zero, floor, self.better, support=self.support)  # the excess of a figure of 0
        if most is None or gained.high is None:
            return Limits()
        if self.better == "higher":
            return Limits(gained.high - most, None)
        top = most - gained.high
        return Limits(None, top) if self.better == "lower" else Limits(-top, top)

    def _on_figure(self, most: float | None) -> Limits:
        """The limit on the excess as one on the figure itself, with the floor at its value."""
        if most is None:
            return Limits()
        if self.better == "higher":
            return Limits(self.floor.known - most, None)
        top = most + abs(self.floor.known)
        return Limits(None, top) if self.better == "lower" else Limits(-top, top)


@dataclass(frozen=True)
class BesidePercentile:
    """A percentile minus the baseline's, paired by document.

    clip: how many times the share of positions beyond the percentile a document counts; None = `default_clip`.
    whole: the documents are all there are.
    """

    paired: PairedPercentile
    clip: float | None
    whole: bool = False

    def figure(self, limits: Limits, *, confidence: float) -> Figure:
        """The difference with its paired interval."""
        value, documents = self.paired.value, len(self.paired.beyond(0.0).sizes)
        if self.whole:
            return Figure(value, Interval(value, value, confidence, WHOLE), documents=documents)
        low, high = self.paired.ends(confidence=confidence)
        return Figure(value, Interval(low, high, confidence, PAIRED), documents=documents)

    def settled(self, limits: Limits, *, confidence: float) -> bool:
        """Whether the bets rule out that more positions are beyond the percentile than the baseline's."""
        return self.whole or all(
            side.beaten(sums.totals, sums.sizes, error=(1 - confidence) / 2) for side, sums in self._sides(limits)
        )

    def reservation(self, limits: Limits, *, confidence: float) -> str:
        """How many more of a document's positions count."""
        error = (1 - confidence) / 2
        return "; ".join(
            f"of a document of average length at most {side.reach:.3g} more positions count as beyond the percentile "
            f"than of the baseline's ({(cut := side.cut(sums.totals, sums.sizes))} cut, at most "
            f"{largest_share(cut, len(sums.sizes), error=error):.1%} of documents)"
            for side, sums in self._sides(limits)
            if not self.whole
        )

    def _sides(self, limits: Limits) -> list[tuple[Side, DocumentSums]]:
        return [self._held(limit, sign) for limit, sign in ((limits.low, -1), (limits.high, 1)) if limit is not None]

    def _held(self, limit: float, sign: int) -> tuple[Side, DocumentSums]:
        sums = self.paired.beyond(limit)
        clip = self.clip or default_clip(len(sums.totals), share=True)
        tail = min(self.paired.level, 100 - self.paired.level) / 100
        return Side(0.0, sign, reach=(clip - 1) * tail, room=1.0), sums
