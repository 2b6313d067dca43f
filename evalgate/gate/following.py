"""What a sequential rule follows: of every document a total and a size, whose ratio over all has to keep limits.

A mean is followed by the sum of its values and their number; a percentile by the number of positions beyond its limit.
So the ratio over all documents is the figure of the whole run, in which each position counts once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Limits
from evalgate.errors import UsageError
from evalgate.gate.policy import Rule, resolve
from evalgate.metrics import Metric, Scores, Statistic
from evalgate.stats.clipped import Side, default_clip, sides
from evalgate.stats.scale import linear

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Followed:
    """A rule followed document by document.

    statistic: of the documents' ratio, the rule's own or, for a percentile, the mean share of positions beyond its
    limit. limits: on that statistic. support: the range of the ratio. ideal: see `guarded.Guarded`.
    """

    rule: Rule
    metric: Metric
    statistic: Statistic
    limits: Limits
    support: tuple[float, float]
    ideal: float

    @property
    def share(self) -> bool:
        """Whether a percentile is followed, by the share of positions beyond its limit."""
        return resolve(self.rule)[1].kind == "percentile"

    def values(self, scores: Scores) -> Floats:
        """The values of a document's positions [n].

        Raises:
            UsageError: these scores do not have them.
        """
        if self.metric.exactness(scores) in (None, "bounded"):
            raise UsageError(f"{self.rule.metric} of {scores.candidate} has no values: judge it without --sequential")
        _, statistic = resolve(self.rule)
        found = self.metric.series(scores).get(statistic.series)
        if found is None:
            raise UsageError(
                f"{self.rule.metric} {statistic.name} of {scores.candidate} needs a reference: compare two models"
            )
        if found.sizes is not None:
            raise _unfit(self.rule)
        if not self.share:
            return found.values
        over = found.values > self.rule.max if self.rule.max is not None else found.values < float(self.rule.min or 0)
        return over.astype(np.float64)

    def sides(self, documents: int, clip: float | None) -> tuple[Side, ...]:
        """The limits as those of a mean over this many documents; clip: see policy.Settings."""
        scale = self.statistic.scale
        low, high = (None if x is None else linear(x, scale) for x in (self.limits.low, self.limits.high))
        cut = clip or default_clip(documents, share=self.share)
        return sides(low, high, ideal=self.ideal, clip=cut, support=self.support)


def followed(rule: Rule) -> Followed:
    """The rule as one that is followed document by document.

    Raises:
        UsageError: it cannot be; says which kinds can.
    """
    metric, statistic = resolve(rule)
    if not rule.kind.sequential or (rule.slice is not None and rule.domain is None) or metric.per != "position":
        raise _unfit(rule)
    if statistic.kind == "percentile":
        if rule.max is not None and rule.min is not None:
            raise _unfit(rule)
        level = statistic.level / 100
        allowed = 1 - level if rule.max is not None else level
        share = Statistic("share of positions beyond the limit")
        return Followed(rule, metric, share, Limits(None, allowed), (0.0, 1.0), 0.0)
    limits = Limits(rule.min, rule.max)
    support = metric.support_of(statistic.series) if statistic.series == metric.primary else (-np.inf, np.inf)
    if statistic.scale == "sqrt":
        support = (0.0, np.inf)
    top = metric.support[1]
    ideal = float(top) if metric.better == "higher" and np.isfinite(top) else 0.0
    found = Followed(rule, metric, statistic, limits, support, ideal)
    if not all(side.reach > 0 and side.room > 0 for side in found.sides(1, None)):
        raise UsageError(f"{rule.text}: no number of documents can show this: give a limit with room")
    return found


def _unfit(rule: Rule) -> UsageError:
    return UsageError(
        f"{rule.text} cannot be followed document by document: --sequential takes absolute limits over all positions "
        "or a domain: on a mean over positions, or one limit on a percentile"
    )
