"""What a sequential rule follows: one number per document, never negative, whose mean has to stay below a limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from evalgate.errors import UsageError
from evalgate.metrics import Metric, Scores
from evalgate.policy import Rule, resolve
from evalgate.stats.limits import DEFAULT_CLIP

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Gauge:
    """What a rule follows: values [n] of a document's positions, each >= 0, whose mean has to stay at or below `most`.

    back: from that mean to the figure that the rule speaks of, where there is one.
    """

    rule: Rule
    metric: Metric
    values: Callable[[Scores], Floats]
    most: float
    clip: float
    back: Callable[[float], float] | None


def gauge(rule: Rule, *, clip: float | None) -> Gauge:
    """The gauge of a rule; clip: times the limit, None = the metric's own range, DEFAULT_CLIP where it has none.

    Raises:
        UsageError: the rule cannot be followed document by document; says which kinds can.
    """
    metric, statistic = resolve(rule)
    if rule.against != "limit" or rule.slice is not None or metric.per != "position":
        raise _unfit(rule)
    if (rule.max is None) == (rule.min is None):
        raise _unfit(rule)

    def series(scores: Scores) -> Floats:
        if metric.exactness(scores) in (None, "bounded"):
            raise UsageError(f"{rule.metric} of {scores.candidate} has no values: judge it without --sequential")
        found = metric.series(scores)[statistic.series]
        if found.sizes is not None:
            raise _unfit(rule)
        return found.values

    level = statistic.level / 100
    top = metric.support[1]
    if statistic.kind == "percentile":
        if rule.max is not None:
            limit, most = rule.max, 1 - level
            return _gauge(rule, metric, lambda s: (series(s) > limit).astype(np.float64), most, 1.0, clip, None)
        limit, most = float(rule.min or 0.0), level
        return _gauge(rule, metric, lambda s: (series(s) < limit).astype(np.float64), most, 1.0, clip, None)
    if statistic.kind != "mean" or statistic.scale != "identity" or metric.support[0] != 0:
        raise _unfit(rule)
    if rule.max is not None:
        return _gauge(rule, metric, series, rule.max, top, clip, lambda mean: mean)
    if not isfinite(top):
        raise _unfit(rule)
    least = top - float(rule.min or 0.0)
    return _gauge(rule, metric, lambda s: top - series(s), least, top, clip, lambda mean: top - mean)


def _gauge(
    rule: Rule,
    metric: Metric,
    values: Callable[[Scores], Floats],
    most: float,
    top: float,
    clip: float | None,
    back: Callable[[float], float] | None,
) -> Gauge:
    if most <= 0:
        raise UsageError(f"{rule.text}: no number of documents can show this: give a limit with room")
    cut = top if clip is None and isfinite(top) else min(top, (clip or DEFAULT_CLIP) * most)
    return Gauge(rule, metric, values, most, cut, back)


def _unfit(rule: Rule) -> UsageError:
    return UsageError(
        f"{rule.text} cannot be followed document by document: --sequential takes absolute limits on one side, on "
        "percentiles and on means of metrics that are never negative, over all positions or a domain"
    )
