"""A limit on the figure itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evalgate.gate.kinds import RuleKind, Sources

if TYPE_CHECKING:
    from evalgate.gate.figures import Maker
    from evalgate.gate.measures import Measure
    from evalgate.gate.policy import Rule
    from evalgate.metrics import Metric, Statistic


class _Limit(RuleKind):
    name = "limit"
    sequential = True

    def idle(self, rule: Rule, metric: Metric, statistic: Statistic) -> str:
        """A limit where the figure never is: 97 for 97 %, say."""
        if statistic.scale != "identity" or statistic.series != metric.primary:
            return ""
        low, high = metric.support_of(statistic.series)
        for name, limit in (("max", rule.max), ("min", rule.min)):
            if limit is not None and not low <= limit <= high:
                end = f"at least {low:g}" if limit < low else f"at most {high:.3g}"
                percent = metric.unit == "fraction" and limit > high
                hint = f", so for {limit:g} % write {limit / 100:g}" if percent else ""
                return f"{name} {limit:g} can never be met or missed: {rule.metric} is {end}{hint}"
        return ""

    def advice(self, rule: Rule, metric: Metric, statistic: Statistic) -> str:
        """No sample shows that a figure lies at the very end of its range."""
        low, high = metric.support_of(statistic.series)
        ends = {"max": (rule.max, low), "min": (rule.min, high)}
        for name, (limit, end) in ends.items():
            if limit == end and statistic.series == metric.primary and statistic.scale == "identity":
                return f"never passes, for no sample shows that {rule.figure} is {end:g}: give {name} room"
        return ""

    def refusal(self, rule: Rule, metric: Metric, statistic: Statistic, sources: Sources) -> str:
        """An endpoint lists its likeliest tokens, which bound some metrics on one side alone."""
        if not sources.remote or sources.recorded:
            return ""
        if metric.listed == "none":
            return (
                f"{metric.name} needs whole distributions, which the endpoint {sources.remote} does not give: "
                'write metric = "js" or "tv"'
            )
        if metric.listed == "lower" and rule.max is not None and statistic.series == "value":
            return (
                f"the endpoint {sources.remote} gives {metric.name} a lower bound only, which can break max but never "
                'keep it: write metric = "js" or "tv", or statistic = "mean_low" for a limit on the lower bound, or '
                'on_undecided = "pass" to fail only where the bound proves it'
            )
        return ""

    def figure(self, name: str, rule: Rule) -> str:
        """The figure itself."""
        return name

    def measure(self, rule: Rule, maker: Maker) -> Measure:
        """The figure itself."""
        return maker.plain()


KIND = _Limit()
