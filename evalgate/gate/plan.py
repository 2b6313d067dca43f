"""How many documents a limit needs for a verdict, from an existing run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Figure, Interval, Limits, Verdict
from evalgate.errors import ScoreError, UsageError
from evalgate.gate.guarded import Guarded
from evalgate.gate.policy import Rule, resolve
from evalgate.metrics import Scores, Series, Statistic
from evalgate.stats.clustered import document_sums
from evalgate.stats.intervals import Sample
from evalgate.stats.rare import RareEvents
from evalgate.stats.ratio import check_confidence
from evalgate.stats.samplesize import documents_needed
from evalgate.stats.scale import linear

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_RANGE = 0.8  # confidence of the pilot's figure from which the range of a plan comes
_DRAWS, _RANGE_DRAWS = 400, 200


@dataclass(frozen=True)
class Plan:
    """What a limit takes. value: the run's figure. verdict: the one it points to.

    documents: how many give it with the asked-for power if the run's documents are what others are like.
    documents_low, documents_high: the same if the true figure is at either end of the run's 80 % interval.
    None: no number up to 100,000 does.
    """

    figure: str
    limit: float
    value: float
    verdict: str
    pilot_documents: int
    documents: int | None
    documents_low: int | None
    documents_high: int | None


@dataclass(frozen=True)
class Plans:
    """What several limits take of one candidate. power: chance of a verdict, in (0, 1)."""

    candidate: str
    power: float
    confidence: float
    plans: tuple[Plan, ...]

    def document(self) -> dict[str, Any]:
        """The plans as `plan --json` prints them."""
        return {**asdict(self), "plans": [asdict(plan) for plan in self.plans]}


def plan(
    rule: Rule,
    scores: Scores,
    *,
    power: float = 0.9,
    confidence: float = 0.95,
    clip: float | None = None,
    seed: int = 0,
) -> Plan:
    """Documents that a rule needs; for a percentile, those that settle the share of positions beyond its limit.

    clip: see policy.Settings. seed: of the documents drawn again.

    Raises:
        UsageError: the run has no such figure. ScoreError: fewer than 2 documents.
    """
    check_confidence(confidence)
    pilot = _pilot(rule, scores, clip)
    if len(pilot.sizes) < 2:
        raise ScoreError("a pilot needs at least 2 documents to show how they differ: add documents")
    now = pilot.figure(_RANGE)
    wanted = _pointed_to(pilot, now.known)

    def needed(totals: Floats, draws: int) -> int | None:
        def decided(drawn: Integers) -> bool:
            return pilot.held(totals[drawn], pilot.sizes[drawn]).verdict(pilot.limits, confidence=confidence) == wanted

        return documents_needed(decided, pilot=len(totals), power=power, seed=seed, draws=draws)

    ends = [
        None if end is None or _pointed_to(pilot, end) != wanted else needed(pilot.moved(end), _RANGE_DRAWS)
        for end in (now.low, now.high)
    ]
    return Plan(
        figure=rule.figure,
        limit=float(rule.max if rule.max is not None else rule.min or 0.0),
        value=pilot.value,
        verdict=wanted,
        pilot_documents=len(pilot.sizes),
        documents=needed(pilot.totals, _DRAWS),
        documents_low=min((n for n in ends if n is not None), default=None),
        documents_high=None if None in ends else max(n for n in ends if n is not None),
    )


@dataclass(frozen=True)
class _Pilot:
    """A run's documents as a rule sees them; for a percentile, by the share of positions beyond its limit.

    totals, sizes [G]: their ratio is the statistic, before its scale. limits: on the statistic. value: the rule's
    figure.
    """

    statistic: Statistic
    limits: Limits
    support: tuple[float, float]
    ideal: float
    share: bool
    clip: float | None
    totals: Floats
    sizes: Floats
    value: float

    def held(self, totals: Floats, sizes: Floats) -> Guarded:
        """The rule's figure over these documents."""
        sample = Sample(Series(totals, sizes=sizes), np.arange(len(sizes)), support=self.support)
        return Guarded(sample, self.statistic, self.ideal, self.clip, share=self.share)

    def figure(self, confidence: float) -> Figure:
        """The statistic with the interval that says where the true one may be."""
        sample = self.held(self.totals, self.sizes).sample
        return sample.figure(self.statistic, confidence=confidence, rare=RareEvents(self.limits, self.clip))

    def moved(self, figure: float) -> Floats:
        """Totals [G] of documents whose statistic is `figure`: stretched from the end of the range, else shifted."""
        mean, at = float(self.totals.sum() / self.sizes.sum()), linear(figure, self.statistic.scale)
        low, high = self.support
        edge = low if np.isfinite(low) else high
        if self.ideal == high:
            edge = high
        if np.isfinite(edge) and mean != edge:
            return edge * self.sizes + (self.totals - edge * self.sizes) * (at - edge) / (mean - edge)
        return self.totals + (at - mean) * self.sizes


def _pilot(rule: Rule, scores: Scores, clip: float | None) -> _Pilot:
    metric, statistic = resolve(rule)
    if metric.exactness(scores) in (None, "bounded"):
        raise UsageError(f"{metric.name} has no values for {scores.candidate}: plan with another metric")
    series = metric.series(scores).get(statistic.series)
    if series is None:
        raise UsageError(f"this run has no {metric.name} {statistic.name}: it needs a reference")
    documents = scores.document if series.rows is None else scores.document[series.rows]
    if statistic.kind == "percentile":
        level = statistic.level / 100
        over = series.values > rule.max if rule.max is not None else series.values < float(rule.min or 0.0)
        sums = document_sums(over.astype(np.float64), documents)
        allowed = Limits(None, 1 - level if rule.max is not None else level)
        value = float(np.percentile(series.values, statistic.level))
        return _Pilot(Statistic("share"), allowed, (0.0, 1.0), 0.0, True, clip, sums.totals, sums.sizes, value)
    limits = Limits(rule.min, rule.max)
    if not all(np.isfinite(linear(x, statistic.scale)) for x in (limits.low, limits.high) if x is not None):
        raise UsageError(f"{rule.text}: this figure is always above 0, so that the limit must be too")
    sums = document_sums(series.values, documents, sizes=series.sizes)
    top = metric.support[1]
    found = _Pilot(
        statistic,
        limits,
        metric.support_of(statistic.series),
        float(top) if metric.better == "higher" and np.isfinite(top) else 0.0,
        False,
        clip,
        sums.totals,
        sums.sizes,
        0.0,
    )
    return replace(found, value=found.figure(_RANGE).known)


def _pointed_to(pilot: _Pilot, figure: float) -> Verdict:
    """The verdict that a figure points to."""
    exactly = Interval(figure, figure)
    return "pass" if pilot.limits.verdict(exactly) == "pass" else "fail"
