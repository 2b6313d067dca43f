"""What no measurement could judge, said before a model is loaded or an endpoint asked."""

from __future__ import annotations

from collections.abc import Collection

from evalgate.errors import UsageError, choose
from evalgate.gate.kinds import Sources
from evalgate.gate.policy import Policy, Rule, resolve

_NAMED = 12  # parts that an error lists
PARTS = ("domain", "document")  # cuts whose parts a text names itself


def check_sources(policy: Policy, sources: Sources) -> None:
    """Refuse rules that such models can never pass, unless the policy lets them pass undecided.

    Raises:
        UsageError: names the rule and says what to write instead.
    """
    for rule in policy.rules:
        said = rule.kind.refusal(rule, *resolve(rule), sources)
        if said and not _only_fails(policy, rule):
            raise UsageError(f"rule {rule.label!r} can never pass: {said}", rule=rule.text)


def _only_fails(policy: Policy, rule: Rule) -> bool:
    """Whether the rule is there to fail where that is proven, and is judged at all."""
    metric, _ = resolve(rule)
    return policy.settled(rule, "undecided") == "pass" and not rule.kind.needs and metric.listed != "none"


def check_parts(policy: Policy, cut: str, names: Collection[str]) -> None:
    """Refuse rules on a part that a text does not have. cut: one of PARTS; names: its parts.

    Raises:
        UsageError: names the rule, and the parts that there are.
    """
    for rule in policy.rules:
        if rule.slice is not None and rule.slice.by == cut and rule.slice.name not in names:
            found = choose(rule.slice.name, sorted(names), most=_NAMED)
            raise UsageError(f"rule {rule.label!r}: the text has no {cut} {rule.slice.name!r}: {found}", rule=rule.text)
