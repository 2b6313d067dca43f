"""A limit on the difference from a baseline run, or on the ratio, on the same positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evalgate.core import Limits
from evalgate.gate.kinds import RuleKind, Sources

if TYPE_CHECKING:
    from evalgate.gate.figures import Maker
    from evalgate.gate.measures import Measure
    from evalgate.gate.policy import Rule
    from evalgate.metrics import Metric, Statistic


def unpaired(metric: Metric, sources: Sources) -> str:
    """Why the metric of an endpoint has no difference from a baseline, and what to write; empty where it has one."""
    if not sources.remote or sources.recorded or metric.listed == "value":
        return ""
    return (
        f"only bounds of {metric.name} are known of the endpoint {sources.remote}, and two bounds have no difference: "
        'set a limit on js or tv with against = "limit"'
    )


class _Baseline(RuleKind):
    name = "baseline"
    needs = "baseline"

    def check_keys(self, rule: Rule) -> None:
        """A ratio stands alone."""
        if rule.max_ratio is None:
            super().check_keys(rule)
        elif rule.max is not None or rule.min is not None:
            raise ValueError('max_ratio stands alone and needs against = "baseline"')

    def misfit(self, rule: Rule, metric: Metric, statistic: Statistic) -> str:
        """Ratios are of plain means."""
        if rule.max_ratio is None or (statistic.kind == "mean" and statistic.scale == "identity"):
            return ""
        return f"max_ratio works on plain means, and {rule.metric} {rule.statistic} is not one: use max"

    def advice(self, rule: Rule, metric: Metric, statistic: Statistic) -> str:
        """Without room a rule asks for an improvement, which is rarely what was meant."""
        tight = (
            (rule.max is not None and rule.max <= 0 and metric.better == "lower")
            or (rule.min is not None and rule.min >= 0 and metric.better == "higher")
            or (rule.max_ratio is not None and rule.max_ratio <= 1 and metric.better == "lower")
        )
        if not tight:
            return ""
        return (
            'passes only what is proven to be better than the baseline, never what is as good: for "not worse" write '
            'against = "regression"'
        )

    def refusal(self, rule: Rule, metric: Metric, statistic: Statistic, sources: Sources) -> str:
        """Bounds cannot be paired."""
        return unpaired(metric, sources)

    def figure(self, name: str, rule: Rule) -> str:
        """The difference or the ratio."""
        return f"{name} - baseline" if rule.max_ratio is None else f"{name} / baseline"

    def limits(self, rule: Rule, metric: Metric) -> Limits:
        """On the difference or on the ratio."""
        return Limits(rule.min, rule.max if rule.max_ratio is None else rule.max_ratio)

    def unit(self, rule: Rule, metric: Metric) -> str:
        """A ratio has none."""
        return metric.unit if rule.max_ratio is None else "ratio"

    def measure(self, rule: Rule, maker: Maker) -> Measure:
        """Paired by document."""
        return maker.against_baseline(ratio=rule.max_ratio is not None)


KIND = _Baseline()
