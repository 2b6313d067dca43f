"""A limit on how far the figure is worse than the noise floor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evalgate.gate.kinds import RuleKind, Sources

if TYPE_CHECKING:
    from evalgate.gate.figures import Maker
    from evalgate.gate.measures import Measure
    from evalgate.gate.policy import Rule
    from evalgate.metrics import Metric, Statistic


class _Floor(RuleKind):
    name = "floor"
    needs = "floor"

    def check_keys(self, rule: Rule) -> None:
        """An excess has one side, and is of all positions or of a domain: no other part has a floor of its own."""
        super().check_keys(rule)
        if rule.min is not None:
            raise ValueError("an excess over the noise floor has a max only")
        if rule.slice is not None and rule.slice.by != "domain":
            raise ValueError(
                f"a slice by {rule.slice.by} has no noise floor of its own: take one by domain, or set a limit with "
                'against = "limit"'
            )

    def misfit(self, rule: Rule, metric: Metric, statistic: Statistic) -> str:
        """A floor is that of a difference between two models."""
        if metric.pair or statistic.series in ("difference", "log_ratio"):
            return ""
        return (
            f"{rule.metric} {rule.statistic} is not a difference between two models and has no noise floor: "
            'use against = "limit"'
        )

    def refusal(self, rule: Rule, metric: Metric, statistic: Statistic, sources: Sources) -> str:
        """The floor is measured by restarting and rebatching."""
        if not sources.remote:
            return ""
        return (
            f"the noise floor of the endpoint {sources.remote} cannot be measured from here: set a limit with "
            'against = "limit"'
        )

    def figure(self, name: str, rule: Rule) -> str:
        """The excess."""
        return f"{name} above the noise floor"

    def measure(self, rule: Rule, maker: Maker) -> Measure:
        """The floor's own interval counts."""
        return maker.above_floor()


KIND = _Floor()
