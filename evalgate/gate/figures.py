"""What a rule measures: from runs to something that gives an interval at any confidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Exactness
from evalgate.errors import MismatchError, UsageError
from evalgate.gate.policy import Rule, resolve
from evalgate.metrics import Metric, Scores, Series, Statistic
from evalgate.stats.excess import Better, Ends, excess
from evalgate.stats.limits import LimitFigure, Limits, Span
from evalgate.stats.paired import same_positions
from evalgate.stats.slices import part_rows
from evalgate.stats.summarize import select

if TYPE_CHECKING:
    from evalgate.summary import Figure, Noise


class Measure(Protocol):
    """A figure that a limit can be held against."""

    def span(self, limits: Limits, *, confidence: float) -> Span:
        """Its interval at a confidence in (0, 1)."""


@dataclass(frozen=True)
class Evidence:
    """What a candidate is judged by: its scores and, where rules ask for them, a baseline's and its noise floor.

    token_texts: decoded text by token id, for slices by token class. clip: see policy.Settings.
    """

    scores: Scores
    seed: int
    clip: float | None = None
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
class Bounded:
    """A figure known only between two others; `high` None = it has no upper bound."""

    low: Measure
    high: Measure | None

    def span(self, limits: Limits, *, confidence: float) -> Span:
        """From the low end of the lower bound to the high end of the upper one."""
        low = self.low.span(limits, confidence=confidence)
        high = None if self.high is None else self.high.span(limits, confidence=confidence)
        return low._replace(value=None, high=None if high is None else high.high)


@dataclass(frozen=True)
class Difference:
    """One figure minus another, without help from their pairing: each interval gets half the error rate."""

    figure: Measure
    other: Measure

    def span(self, limits: Limits, *, confidence: float) -> Span:
        """Ends of the two intervals, subtracted crosswise."""
        each = (1 + confidence) / 2
        b = self.other.span(Limits(None, None), confidence=each)
        if b.value is None:
            raise UsageError("the baseline's figure is only bounded: compare runs whose figures are exact")
        shifted = Limits(*(None if x is None else x + b.value for x in (limits.low, limits.high)))
        a = self.figure.span(shifted, confidence=each)
        value = None if a.value is None else a.value - b.value
        return Span(value, _minus(a.low, b.high), _minus(a.high, b.low), confidence, a.method, alike=a.alike)


@dataclass(frozen=True)
class Excess:
    """How far a figure is worse than its noise floor, whose own interval counts."""

    figure: Measure
    floor: Figure
    better: Better

    def span(self, limits: Limits, *, confidence: float) -> Span:
        """Positive = worse than the floor; the floor's interval is that of its own confidence."""
        span = self.figure.span(self._on_figure(limits.high), confidence=confidence)
        floor = Ends(self.floor.value, self.floor.low, self.floor.high)
        return span._replace(**excess(Ends(span.value, span.low, span.high), floor, self.better)._asdict())

    def _on_figure(self, most: float | None) -> Limits:
        """The limit on the excess as one on the figure itself."""
        if most is None:
            return Limits(None, None)
        if self.better == "higher":
            return Limits(self.floor.value - most, None)
        top = most + abs(self.floor.value)
        return Limits(None, top) if self.better == "lower" else Limits(-top, top)


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


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
            return Bounded(self._figure(found["low"]), None if high is None else self._figure(high))
        if wanted not in found:
            raise UsageError(f"this run has no {self.metric.name} {self.statistic.name}: it needs a reference")
        return self._figure(found[wanted])

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
            return self._figure(paired, support=(0.0, np.inf))
        low, high = self.metric.support
        paired = Series(ours.values - theirs.values, sizes=ours.sizes, rows=ours.rows)
        return self._figure(paired, support=(low - high, high - low))

    def _values(self, scores: Scores) -> Series:
        if _exactness(self.metric, scores) == "bounded":
            raise UsageError(f"{self.metric.name} of {scores.candidate} is only bounded and cannot be paired")
        found = self.metric.series(scores)
        if self.statistic.scale != "identity" or self.statistic.series not in found:
            raise UsageError(
                f"{self.metric.name} {self.statistic.name} cannot be compared with a baseline: use a plain mean"
            )
        return select(found[self.statistic.series], self.keep)

    def _figure(self, series: Series, *, support: tuple[float, float] | None = None) -> LimitFigure:
        document = self.evidence.scores.document
        rows: slice | NDArray[np.bool_] = slice(None) if self.keep is None else self.keep
        return LimitFigure(
            series=series,
            documents=document[rows] if series.rows is None else document[series.rows],
            statistic=self.statistic,
            support=self.metric.support if support is None else support,
            seed=self.evidence.seed,
            clip=self.evidence.clip,
        )


def _rows(rule: Rule, evidence: Evidence) -> NDArray[np.bool_] | None:
    if rule.domain is not None:
        return part_rows(evidence.scores, by="domain", name=rule.domain)
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
    return figures[rule.statistic]


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
