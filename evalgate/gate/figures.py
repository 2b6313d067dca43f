"""What a rule measures: from runs to something that gives an interval at any confidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Exactness, Figure, Limits
from evalgate.errors import MismatchError, UsageError
from evalgate.gate.guarded import Guarded
from evalgate.gate.kinds import RuleKind
from evalgate.gate.kinds.limit import KIND as LIMIT
from evalgate.gate.measures import BesidePercentile, Bounded, Excess, Known, Measure
from evalgate.gate.policy import Rule, Unit, resolve
from evalgate.metrics import Metric, Scores, Series, Statistic
from evalgate.stats.intervals import Sample
from evalgate.stats.paired import same_positions
from evalgate.stats.paired_percentile import PairedPercentile
from evalgate.stats.slices import part_rows
from evalgate.stats.summarize import select

if TYPE_CHECKING:
    from evalgate.summary import Noise

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
K = TypeVar("K", np.int32, np.int64)


@dataclass(frozen=True)
class Evidence:
    """What a candidate is judged by: its scores and, where rules ask for them, a baseline's and its noise floor.

    token_texts: decoded text by token id, for slices by token class. clip, unit: see policy.Settings. whole: the
    population is the corpus.
    """

    scores: Scores
    clip: float | None = None
    unit: Unit = "documents"
    whole: bool = False
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
    kind: RuleKind = LIMIT


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
    maker = Maker(rule, metric, statistic, keep, evidence)
    return RuleFigure(
        measure=rule.kind.measure(rule, maker),
        limits=rule.kind.limits(rule, metric),
        metric=metric,
        statistic=statistic,
        exactness=exactness,
        documents=len(np.unique(scores.document[slice(None) if keep is None else keep])),
        positions=len(scores) if keep is None else int(keep.sum()),
        kind=rule.kind,
    )


@dataclass(frozen=True)
class Maker:
    """Makes the measures of one statistic over the rows that `keep` [n] selects, None = all."""

    rule: Rule
    metric: Metric
    statistic: Statistic
    keep: NDArray[np.bool_] | None
    evidence: Evidence

    def plain(self) -> Measure:
        """The figure itself."""
        scores = self.evidence.scores
        found = {name: select(s, self.keep) for name, s in self.metric.series(scores).items()}
        wanted = self.statistic.series
        if _exactness(self.metric, scores) == "bounded" and wanted == "value":
            high = found.get("high")
            return Bounded(self._held(found["low"]), None if high is None else self._held(high))
        if wanted not in found:
            raise UsageError(f"this run has no {self.metric.name} {self.statistic.name}: it needs a reference")
        return self._held(found[wanted])

    def above_floor(self) -> Measure:
        """How far the figure is worse than the noise floor."""
        floor = _floor(self.rule, self.metric, self.statistic, self.evidence.noise)
        return Excess(self.plain(), floor, self.metric.better, self.metric.support)

    def against_baseline(self, *, ratio: bool) -> Measure:
        """The figure minus the baseline's, or divided by it, paired by document."""
        baseline = self.evidence.baseline
        if baseline is None:
            raise UsageError("a rule compares with a baseline: name its run folder with --baseline RUN")
        same_positions(self.evidence.scores, baseline)
        ours, theirs = (self._values(scores) for scores in (self.evidence.scores, baseline))
        if self.statistic.kind == "percentile":
            documents = self._by_row(ours, self.evidence.scores.document)
            pair = PairedPercentile(ours.values, theirs.values, documents, self.statistic.level)
            return BesidePercentile(pair, self.evidence.clip, whole=self.evidence.whole)
        if ratio:
            sizes = self._divisors(theirs)
            if (sizes < 0).any() or not sizes.any() or theirs.sizes is not None:
                raise UsageError(
                    f"the baseline's {self.metric.name} cannot be divided by (it is 0, negative or already a ratio): "
                    "give max, a difference"
                )
            paired = Series(ours.values, sizes=sizes, rows=ours.rows)
            return self._held(paired, support=(0.0, np.inf))
        low, high = self.metric.support
        paired = Series(ours.values - theirs.values, sizes=ours.sizes, rows=ours.rows)
        size = len(theirs.values) if theirs.sizes is None else float(theirs.sizes.sum())
        # The distance from the ideal to the limit is that of the candidate's own figure.
        ideal = self._ideal - float(theirs.values.sum()) / size
        return self._held(paired, support=(low - high, high - low), ideal=ideal)

    def _divisors(self, series: Series) -> Floats:
        """The values to divide by; of estimates each window's mean, since a single one may be below 0."""
        if series.se is None:
            return series.values
        windows = np.unique(self._by_row(series, self.evidence.scores.window), return_inverse=True)[1]
        means: Floats = np.bincount(windows, weights=series.values) / np.bincount(windows)
        return means[windows]

    def _values(self, scores: Scores) -> Series:
        if _exactness(self.metric, scores) == "bounded":
            raise UsageError(f"{self.metric.name} of {scores.candidate} is only bounded and cannot be paired")
        found = self.metric.series(scores)
        if self.statistic.scale != "identity" or self.statistic.series not in found:
            raise UsageError(
                f"{self.metric.name} {self.statistic.name} cannot be compared with a baseline: use a plain mean"
            )
        return select(found[self.statistic.series], self.keep)

    def _held(
        self, series: Series, *, support: tuple[float, float] | None = None, ideal: float | None = None
    ) -> Measure:
        sample = Sample(
            series,
            self._by_row(series, self.evidence.scores.document),
            windows=self._by_row(series, self.evidence.scores.window) if self.evidence.unit == "batches" else None,
            support=self.metric.support_of(self.statistic.series) if support is None else support,
        )
        if self.evidence.whole:
            return Known(sample, self.statistic)
        return Guarded(sample, self.statistic, self._ideal if ideal is None else ideal, self.evidence.clip)

    def _by_row(self, series: Series, column: NDArray[K]) -> NDArray[K]:
        """A key column of the scores, as long as the series."""
        if series.rows is not None:
            return column[series.rows]
        return column if self.keep is None else column[self.keep]

    @property
    def _ideal(self) -> float:
        """The mean of a candidate that is its reference."""
        top = self.metric.support[1]
        return top if self.metric.better == "higher" and isfinite(top) else 0.0


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


def _floor(rule: Rule, metric: Metric, statistic: Statistic, noise: Noise | None) -> Figure:
    """The floor of the positions that the rule speaks of."""
    if noise is None:
        raise UsageError("a rule speaks of the noise floor, and this run has none: measure again with --noise-floor")
    found, place = noise.figures, ""
    if rule.domain is not None:
        if rule.domain not in noise.domains:
            raise UsageError(f"this run has no noise floor of domain {rule.domain}: measure again with --noise-floor")
        found, place = noise.domains[rule.domain], f" in domain {rule.domain}"
    figures = found.get(metric.name, {})
    if statistic.name not in figures:
        known = ", ".join(figures) or "nothing"
        raise UsageError(f"the noise floor of {metric.name}{place} has no {statistic.name}: it has {known}")
    return figures[statistic.name].figure


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
