"""How many documents a limit needs for a verdict, from an existing run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from evalgate.errors import UsageError
from evalgate.gate.policy import Rule, resolve
from evalgate.metrics import Scores
from evalgate.stats.samplesize import documents_needed
from evalgate.stats.scale import linear


@dataclass(frozen=True)
class Plan:
    """What a limit takes. value: the run's figure. verdict: the one it points to.

    documents: how many give it with the asked-for power if the run's figure and spread are right; documents_high: with
    the spread at its 80 % upper limit. None: the figure is too close to the limit for any corpus.
    """

    figure: str
    limit: float
    value: float
    verdict: str
    pilot_documents: int
    documents: int | None
    documents_high: int | None


@dataclass(frozen=True)
class Plans:
    """What several limits take. power: chance of a verdict, in (0, 1)."""

    power: float
    confidence: float
    plans: tuple[Plan, ...]

    def document(self) -> dict[str, Any]:
        """The plans as `plan --json` prints them."""
        return {**asdict(self), "plans": [asdict(plan) for plan in self.plans]}


def parse_limit(text: str) -> Rule:
    """`kl=0.01`, `kl.p99=0.1`, `top1_agreement=0.97`: a limit on the side that the metric's direction asks for.

    Raises:
        UsageError: it is no limit, or names no metric or statistic.
    """
    name, equals, number = text.partition("=")
    metric, _, statistic = name.strip().partition(".")
    try:
        limit = float(number)
    except ValueError:
        limit = float("nan")
    if not equals or not np.isfinite(limit):
        raise UsageError(f"'{text}' is no limit: write METRIC=VALUE or METRIC.STATISTIC=VALUE, as in kl.p99=0.1")
    rule = Rule(metric=metric, statistic=statistic or "mean", max=limit)
    if resolve(rule)[0].better == "higher":
        rule = Rule(metric=metric, statistic=statistic or "mean", min=limit)
    return rule


def plan(rule: Rule, scores: Scores, *, power: float = 0.9, confidence: float = 0.95) -> Plan:
    """Documents that a rule needs; for a percentile, those that settle the share of positions beyond its limit.

    Raises:
        UsageError: the run has no such figure. ScoreError: fewer than 2 documents.
    """
    metric, statistic = resolve(rule)
    limit = float(rule.max if rule.max is not None else rule.min or 0.0)
    if metric.exactness(scores) in (None, "bounded"):
        raise UsageError(f"{metric.name} has no values for {scores.candidate}: plan with another metric")
    series = metric.series(scores).get(statistic.series)
    if series is None:
        raise UsageError(f"this run has no {metric.name} {statistic.name}: it needs a reference")
    documents = scores.document if series.rows is None else scores.document[series.rows]
    upper = rule.max is not None
    if statistic.kind == "percentile":
        level = statistic.level / 100
        beyond = series.values > limit if upper else series.values < limit
        found = documents_needed(
            beyond.astype(np.float64),
            documents,
            limit=1 - level if upper else level,
            power=power,
            confidence=confidence,
        )
        value, below = float(np.percentile(series.values, statistic.level)), True
    else:
        on_line = linear(limit, statistic.scale)
        if not np.isfinite(on_line):
            raise UsageError(f"{rule.text}: this figure is always above 0, so that the limit must be too")
        found = documents_needed(
            series.values, documents, limit=on_line, sizes=series.sizes, power=power, confidence=confidence
        )
        value, below = _shown(found.value, statistic.scale), upper
    return Plan(
        figure=rule.figure,
        limit=limit,
        value=value,
        verdict="pass" if (found.verdict == "pass") == below else "fail",
        pilot_documents=found.pilot_documents,
        documents=found.documents,
        documents_high=found.documents_high,
    )


def _shown(value: float, scale: str) -> float:
    return float(np.exp(value) if scale == "exp" else np.sqrt(value) if scale == "sqrt" else value)
