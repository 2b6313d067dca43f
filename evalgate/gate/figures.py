"""What a rule measures: from runs to something that gives an interval at any confidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Exactness, Figure, Limits
from evalgate.errors import MismatchError, UsageError
from evalgate.gate.policy import Rule, Unit, resolve
from evalgate.metrics import Metric, Scores, Series, Statistic
from evalgate.stats.excess import Better, difference, excess
from evalgate.stats.intervals import Sample
from evalgate.stats.paired import same_positions
from evalgate.stats.rare import RareEvents
from evalgate.stats.slices import part_rows
from evalgate.stats.summarize import select

if TYPE_CHECKING:
    from evalgate.summary import Noise


class Measure(Protocol):
    """A figure that a limit can be held against."""

    def figure(self, limits: Limits, *, confidence: float) -> Figure:
        """It with its interval at a confidence in (0, 1); the limits only matter where the documents are alike."""


@dataclass(frozen=True)
class Evidence:
    """What a candidate is judged by: its scores and, where rules ask for them, a baseline's and its noise floor.

    token_texts: decoded text by token id, for slices by token class. clip, unit: see policy.Settings.
    """

    scores: Scores
    seed: int
    clip: float | None = None
    unit: Unit = "documents"
    baseline: Scores | None = None
    noise: Noise | None = None
    token_texts: Mapping[int, str] | None = None


@dataclass(frozen=True)
class RuleFigure:
    """A rule's figure over its documents and positions."""

    measure: Measure
    limits: Limits
    metric: Metric
    statistic: Statistic
    exactness: Exactness
    documents: int
    positions: int


def rule_figure(rule: Rule, evidence: Evidence) -> RuleFigure:
    """The figure that a rule speaks of.

    Raises:
        UsageError: the rule asks for something that the run does not have; says what to do.
        MismatchError: the baseline run has other positions. ScoreError: a bad value in a column that is needed.
    """
    metric, statistic = resolve(rule)
    scores = evidence.scores
    keep = _rows(rule, evidence)
    exactness = _exactness(metric, scores)
    maker = _Maker(metric, statistic, keep, evidence)
    if rule.against == "baseline":
        measure = maker.against_baseline(ratio=rule.max_ratio is not None)
    elif rule.against == "floor":
        measure = Excess(maker.plain(scores), _floor(rule, evidence.noise), metric.better)
    else:
        measure = maker.plain(scores)
    return RuleFigure(
        measure=measure,
        limits=Limits(rule.min, rule.max if rule.max_ratio is None else rule.max_ratio),
        metric=metric,
        statistic=statistic,
        exactness=exactness,
        documents=len(np.unique(scores.document[slice(None) if keep is None else keep])),
        positions=len(scores) if keep is None else int(keep.sum()),
    )


@dataclass(frozen=True)
class Plain:
    """One statistic of a sample: the summary's figure, at any confidence and widened where documents are alike."""

    sample: Sample
    statistic: Statistic
    clip: float | None

    def figure(self, limits: Limits, *, confidence: float) -> Figure:
        """The statistic with its interval."""
        return self.sample.figure(self.statistic, confidence=confidence, rare=RareEvents(limits, self.clip))


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


@dataclass(frozen=True)
class Difference:
    """One figure minus another, without help from their pairing: each interval gets half the error rate."""

    one: Measure
    other: Measure

    def figure(self, limits: Limits, *, confidence: float) -> Figure:
        """Ends of the two intervals, subtracted crosswise."""
        each = (1 + confidence) / 2
        b = self.other.figure(Limits(), confidence=each)
        if b.value is None:
            raise UsageError("the baseline's figure is only bounded: compare runs whose figures are exact")
        shifted = Limits(*(None if x is None else x + b.value for x in (limits.low, limits.high)))
        a = self.one.figure(shifted, confidence=each)
        ends = a.interval.between(difference(a.low, b.high), difference(a.high, b.low))
        return replace(a, value=difference(a.value, b.value), interval=replace(ends, confidence=confidence), se=None)


@dataclass(frozen=True)
class Excess:
    """How far a figure is worse than its noise floor, whose own interval counts."""

    own: Measure
    floor: Figure
    better: Better

    def figure(self, limits: Limits, *, confidence: float) -> Figure:
        """Positive = worse than the floor; the floor's interval is that of its own confidence."""
        return excess(self.own.figure(self._on_figure(limits.high), confidence=confidence), self.floor, self.better)

    def _on_figure(self, most: float | None) -> Limits:
        """The limit on the excess as one on the figure itself."""
        if most is None:
            return Limits()
        if self.better == "higher":
            return Limits(self.floor.known - most, None)
        top = most + abs(self.floor.known)
        return Limits(None, top) if self.better == "lower" else Limits(-top, top)


@dataclass(frozen=True)
class _Maker:
    """Makes the measures of one statistic over the rows that `keep` [n] selects, None = all."""

    metric: Metric
    statistic: Statistic
    keep: NDArray[np.bool_] | None
    evidence: Evidence

    def plain(self, scores: Scores) -> Measure:
        """The figure itself."""
        found = {name: select(s, self.keep) for name, s in self.metric.series(scores).items()}
        wanted = self.statistic.series
        if _exactness(self.metric, scores) == "bounded" and wanted == "value":
            high = found.get("high")
            return Bounded(self._held(found["low"]), None if high is None else self._held(high))
        if wanted not in found:
            raise UsageError(f"this run has no {self.metric.name} {self.statistic.name}: it needs a reference")
        return self._held(found[wanted])

    def against_baseline(self, *, ratio: bool) -> Measure:
        """The figure minus the baseline's, or divided by it; paired where it is a mean."""
        baseline = self.evidence.baseline
        if baseline is None:
            raise UsageError("a rule compares with a baseline: name its run folder with --baseline RUN")
        same_positions(self.evidence.scores, baseline)
        if self.statistic.kind == "percentile":
            return Difference(self.plain(self.evidence.scores), self.plain(baseline))
        ours, theirs = (self._values(scores) for scores in (self.evidence.scores, baseline))
        if ratio:
            if (theirs.values < 0).any() or not theirs.values.any() or theirs.sizes is not None:
                raise UsageError(
                    f"the baseline's {self.metric.name} cannot be divided by (it is 0, negative or already a ratio): "
                    "give max, a difference"
                )
            paired = Series(ours.values, sizes=theirs.values, rows=ours.rows)
            return self._held(paired, support=(0.0, np.inf))
        low, high = self.metric.support
        paired = Series(ours.values - theirs.values, sizes=ours.sizes, rows=ours.rows)
        return self._held(paired, support=(low - high, high - low))

    def _values(self, scores: Scores) -> Series:
        if _exactness(self.metric, scores) == "bounded":
            raise UsageError(f"{self.metric.name} of {scores.candidate} is only bounded and cannot be paired")
        found = self.metric.series(scores)
        if self.statistic.scale != "identity" or self.statistic.series not in found:
            raise UsageError(
                f"{self.metric.name} {self.statistic.name} cannot be compared with a baseline: use a plain mean"
            )
        return select(found[self.statistic.series], self.keep)

    def _held(self, series: Series, *, support: tuple[float, float] | None = None) -> Plain:
        scores = self.evidence.scores
        rows: slice | NDArray[np.bool_] | NDArray[np.int64] = slice(None) if self.keep is None else self.keep
        if series.rows is not None:
            rows = series.rows
        sample = Sample(
            series,
            scores.document[rows],
            windows=scores.window[rows] if self.evidence.unit == "batches" else None,
            support=self.metric.support if support is None else support,
        )
        return Plain(sample, self.statistic, self.evidence.clip)


def _rows(rule: Rule, evidence: Evidence) -> NDArray[np.bool_] | None:
    if rule.slice is not None:
        return part_rows(evidence.scores, by=rule.slice.by, name=rule.slice.name, token_texts=evidence.token_texts)
    return None


def _exactness(metric: Metric, scores: Scores) -> Exactness:
    found = metric.exactness(scores)
    if found is None:
        why = "a noise floor" if metric.needs_floor and scores.noise_floor is None else ", ".join(metric.columns)
        raise UsageError(
            f"{metric.name} cannot be judged: this run has no {why} for {scores.candidate}", metric=metric.name
        )
    return found


def _floor(rule: Rule, noise: Noise | None) -> Figure:
    if noise is None:
        raise UsageError("a rule speaks of the noise floor, and this run has none: measure again with --noise-floor")
    figures = noise.figures.get(rule.metric, {})
    if rule.statistic not in figures:
        known = ", ".join(figures) or "nothing"
        raise UsageError(f"the noise floor of {rule.metric} has no {rule.statistic}: it has {known}")
    return figures[rule.statistic].figure


def baseline_scores(scores: Scores, candidates: Mapping[str, Scores]) -> Scores:
    """The baseline run's candidate that stands for this one: its namesake, or the only one there is.

    Raises:
        MismatchError: there are several and none has the name.
    """
    if scores.candidate in candidates:
        return candidates[scores.candidate]
    if len(candidates) == 1:
        return next(iter(candidates.values()))
    raise MismatchError(
        f"the baseline run has no candidate {scores.candidate} and several others ({', '.join(candidates)}): "
        "give a baseline run with one candidate"
    )
