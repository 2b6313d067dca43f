"""Not worse than the baseline run: fails only where worse is proven.

The question of a release is rarely "is it proven to be as good", which no equal candidate can show, but "has it got
worse". So a pass claims nothing: it means that the documents do not prove the candidate worse, and its reason says how
much worse is not excluded. A fail is a claim. A candidate that is no worse is failed with at most half the error rate
1 - confidence; with correction = "holm" that holds for all rules of the policy together, this one among them. Since a
pass claims nothing, such a rule takes no share of the error rate of passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from evalgate.core import Figure, Limits, Verdict
from evalgate.gate.kinds import RuleKind, Sources
from evalgate.gate.kinds.baseline import unpaired

if TYPE_CHECKING:
    from evalgate.gate.figures import Maker
    from evalgate.gate.measures import Measure
    from evalgate.gate.policy import Rule
    from evalgate.metrics import Metric, Statistic


class _Regression(RuleKind):
    name = "regression"
    needs = "baseline"
    proves: tuple[Verdict, ...] = ("fail",)
    means = (
        "A rule against regression fails when its whole interval is worse than the baseline, and passes else: a pass "
        "says that worse is not proven, not that it is excluded."
    )

    def check_keys(self, rule: Rule) -> None:
        """It takes one key at most, how much worse is tolerated."""
        if rule.min is not None or rule.max_ratio is not None:
            raise ValueError("a rule against regression takes max only: how much worse than the baseline is tolerated")
        if rule.max is not None and rule.max < 0:
            raise ValueError(f'max {rule.max:g} asks for an improvement: use against = "baseline"')

    def misfit(self, rule: Rule, metric: Metric, statistic: Statistic) -> str:
        """Worse has to be a direction."""
        if metric.better != "zero" and statistic.series != "reference":
            return ""
        return f"{rule.metric} {rule.statistic} has no direction that is worse: set limits with min and max"

    def refusal(self, rule: Rule, metric: Metric, statistic: Statistic, sources: Sources) -> str:
        """Bounds cannot be paired."""
        return unpaired(metric, sources)

    def figure(self, name: str, rule: Rule) -> str:
        """The difference."""
        return f"{name} - baseline"

    def text(self, rule: Rule) -> str:
        """The rule in words."""
        name = rule.figure.removesuffix(" - baseline")
        return f"{name} at most {rule.max:g} worse than baseline" if rule.max else f"{name} not worse than baseline"

    def limits(self, rule: Rule, metric: Metric) -> Limits:
        """On the difference, on the side that is worse."""
        margin = rule.max or 0.0
        return Limits(-margin, None) if metric.better == "higher" else Limits(None, margin)

    def measure(self, rule: Rule, maker: Maker) -> Measure:
        """Paired by document."""
        return maker.against_baseline(ratio=False)

    def verdict(self, measure: Measure, limits: Limits, found: Figure) -> Verdict:
        """Undecided only where the sample looks worse and has too few documents to prove anything."""
        if limits.verdict(found.interval) == "fail":
            return "fail"
        end = found.low if limits.low is None else found.high
        looks_worse = found.value is not None and not limits.hold(found.value)
        return "undecided" if not found.interval.known or (looks_worse and end is None) else "pass"

    def reason(self, limits: Limits, found: Figure, verdict: Verdict) -> str:
        """What is proven, or how much worse is not excluded."""
        interval = f"{found.interval.confidence * 100:.4g} % interval"
        if verdict == "fail":
            return f"the whole {interval} of the difference is worse than what is tolerated"
        if verdict != "pass":
            return ""
        far = found.high if limits.low is None else found.low
        left = "how much worse it may be is not known" if far is None else f"up to {abs(far):.3g} worse is not excluded"
        if far is not None and limits.hold(far):
            left = "the whole interval is on the tolerated side"
        return f"worse is not proven ({interval}): {left}"


KIND = _Regression()
