"""A rule's verdict as the report holds it, with one sentence on why."""

from __future__ import annotations

from typing import Any

from evalgate.core import NO_METHOD, NOT_APPLICABLE, Limits, counted
from evalgate.gate.family import Decision
from evalgate.gate.figures import RuleFigure
from evalgate.gate.policy import Policy, Rule, resolve
from evalgate.gate.report import RuleVerdict
from evalgate.metrics import Metric
from evalgate.stats.rare import FEW
from evalgate.stats.units import FEWEST_WINDOWS


def not_applicable(policy: Policy, rule: Rule) -> RuleVerdict:
    """The verdict of a rule that rests on a baseline run which is not there yet."""
    metric, _ = resolve(rule)
    return _verdict(
        policy,
        rule,
        metric,
        rule.kind.limits(rule, metric),
        verdict=NOT_APPLICABLE,
        reason="there is no baseline run yet: the run of this gate can become it",
        value=None,
        low=None,
        high=None,
        confidence=policy.policy.confidence,
        method=NO_METHOD,
        exactness="exact",
        documents=0,
        positions=0,
    )


def rule_verdict(policy: Policy, rule: Rule, figure: RuleFigure, decision: Decision) -> RuleVerdict:
    """A decision as the report holds it."""
    found, interval = decision.figure, decision.figure.interval
    return _verdict(
        policy,
        rule,
        figure.metric,
        figure.limits,
        verdict=decision.verdict,
        proven=decision.verdict in (*figure.kind.proves, "undecided"),
        reason=reason(figure, decision),
        value=found.value,
        low=interval.low,
        high=interval.high,
        confidence=interval.confidence,
        method=interval.method,
        label=interval.label,
        exactness=figure.exactness,
        documents=figure.documents,
        positions=figure.positions,
    )


def _verdict(policy: Policy, rule: Rule, metric: Metric, limits: Limits, **found: Any) -> RuleVerdict:
    """What the rule says of itself, with what was found."""
    return RuleVerdict(
        rule=rule.label,
        text=rule.text,
        figure=rule.figure,
        metric=rule.metric,
        statistic=rule.statistic,
        unit=rule.kind.unit(rule, metric),
        on_undecided=policy.settled(rule, "undecided"),
        min=limits.low,
        max=limits.high,
        **found,
    )


def reason(figure: RuleFigure, decision: Decision) -> str:
    """One sentence on why the verdict is what it is."""
    found = decision.figure
    said = figure.kind.reason(figure.limits, found, decision.verdict)
    if said:
        return said
    interval = f"{found.interval.confidence * 100:.4g} % interval"
    if decision.verdict == "pass":
        left = figure.measure.reservation(figure.limits, confidence=found.interval.confidence)
        return f"the whole {interval} is inside the limit" + (f"; {left}" if left else "")
    if decision.verdict == "fail":
        return f"the whole {interval} is outside the limit"
    if figure.limits.verdict(found.interval) == "pass":
        left = figure.measure.reservation(figure.limits, confidence=found.interval.confidence)
        return f"the whole {interval} is inside the limit, but {left}: measure more documents"
    if not found.interval.known:
        return (
            f"{figure.documents} document gives no interval: measure at least 2, or {FEWEST_WINDOWS} windows of it "
            'with unit = "batches" in the policy'
        )
    if figure.statistic.kind == "percentile" and not found.interval.closed:
        return f"the sample does not support an end of the {interval} on that side: measure more documents"
    if found.alike:
        n = figure.documents
        few = (
            f"there are only {counted(n, 'document')}"
            if n < FEW
            else f"fewer than {FEW} of {counted(n, 'document')} differ"
        )
        return f"{few}, too few to rule out that another is far off ({interval}): measure more"
    if figure.exactness == "bounded":
        return f"only bounds are known, and their {interval} does not settle the limit"
    return f"the {interval} contains the limit: measure more documents (`evalgate plan` says how many)"
