"""What a sequential rule follows: one number per document, never negative, whose mean has to stay within limits.

A rule with both a min and a max is followed by the distance to the middle between them, cut to `reach` on both sides
and shifted by `reach`, so that it is in [0, 2 reach].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from evalgate.errors import UsageError
from evalgate.gate.policy import Rule, resolve
from evalgate.metrics import Metric, Scores
from evalgate.stats.rare import DEFAULT_CLIP

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Gauge:
    """What a rule follows: values [n] of a document's positions, whose mean has to stay in [least, most].

    A document's mean counts as cut to [0, clip]. It is never negative but with `cut_below`: then a cut may raise the
    mean as well as lower it, and the mean of what was cut bounds the true one on neither side.
    back: from that mean to the figure that the rule speaks of, where there is one.
    """

    rule: Rule
    metric: Metric
    values: Callable[[Scores], Floats]
    most: float
    clip: float
    back: Callable[[float], float] | None
    least: float = -inf
    cut_below: bool = False


def gauge(rule: Rule, *, clip: float | None) -> Gauge:
    """The gauge of a rule; clip: times the limit, None = the metric's own range, DEFAULT_CLIP where it has none.

    Raises:
        UsageError: the rule cannot be followed document by document; says which kinds can.
    """
    metric, statistic = resolve(rule)
    if rule.against != "limit" or (rule.slice is not None and rule.domain is None) or metric.per != "position":
        raise _unfit(rule)

    def series(scores: Scores) -> Floats:
        if metric.exactness(scores) in (None, "bounded"):
            raise UsageError(f"{rule.metric} of {scores.candidate} has no values: judge it without --sequential")
        found = metric.series(scores).get(statistic.series)
        if found is None:
            raise UsageError(
                f"{rule.metric} {statistic.name} of {scores.candidate} needs a reference: compare two models"
            )
        if found.sizes is not None:
            raise _unfit(rule)
        return found.values

    if rule.max is not None and rule.min is not None:
        if statistic.kind != "mean" or statistic.scale != "identity":
            raise _unfit(rule)
        return _two_sided(rule, metric, series, rule.min, rule.max, clip)
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
        raise _no_room(rule)
    cut = top if clip is None and isfinite(top) else min(top, (clip or DEFAULT_CLIP) * most)
    return Gauge(rule, metric, values, most, cut, back)


def _two_sided(
    rule: Rule, metric: Metric, series: Callable[[Scores], Floats], low: float, high: float, clip: float | None
) -> Gauge:
    middle, room = (low + high) / 2, (high - low) / 2
    if room <= 0:
        raise _no_room(rule)
    _, statistic = resolve(rule)
    bottom, top = metric.support if statistic.series == metric.primary else (-inf, inf)
    whole = max(top - middle, middle - bottom)
    reach = whole if clip is None and isfinite(whole) else min(whole, (clip or DEFAULT_CLIP) * room)
    shift = reach - middle
    return Gauge(
        rule,
        metric,
        lambda s: series(s) + shift,
        most=reach + room,
        clip=2 * reach,
        back=lambda mean: mean - shift,
        least=reach - room,
        cut_below=reach < whole,
    )


def _no_room(rule: Rule) -> UsageError:
    return UsageError(f"{rule.text}: no number of documents can show this: give a limit with room")


def _unfit(rule: Rule) -> UsageError:
    return UsageError(
        f"{rule.text} cannot be followed document by document: --sequential takes absolute limits over all positions "
        "or a domain: one limit on a percentile or on the mean of a metric that is never negative, or both min and max "
        "on a mean"
    )
