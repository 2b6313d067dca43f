"""Rules and limits as they stand on a command line: `kl=0.01`, `kl.p99=0.1`, `top1=0.97`."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from typing import NamedTuple

from pydantic import ValidationError

from evalgate.errors import UsageError
from evalgate.gate.policy import COMMAND_LINE, Policy, Rule, Settings, check_rules, resolve


class Named(NamedTuple):
    """A figure and a number, None where none was given."""

    metric: str
    statistic: str
    number: float | None


def named(text: str) -> Named:
    """METRIC, METRIC=VALUE or METRIC.STATISTIC=VALUE; a metric may be cut to what still tells it from the others.

    Raises:
        UsageError: the value is not a number.
    """
    name, equals, number = text.partition("=")
    metric, _, statistic = name.strip().partition(".")
    return Named(_whole(metric), statistic or "mean", _number(number, text) if equals else None)


def one_rule(side: str, text: str) -> Rule:
    """The rule that `--max TEXT`, `--min TEXT` or `--no-regression TEXT` (side "regression") stands for.

    Raises:
        UsageError: it is no limit, or names no metric or statistic.
    """
    found = named(text)
    if side != "regression" and found.number is None:
        raise UsageError(f"'{text}' is not a limit: write METRIC=VALUE or METRIC.STATISTIC=VALUE, as in kl.p99=0.1")
    kind = {"max": found.number, "against": side} if side == "regression" else {side: found.number}
    try:
        rule = Rule.model_validate({"metric": found.metric, "statistic": found.statistic, **kind})
    except ValidationError as error:
        raise UsageError(f"'{text}': {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error
    resolve(rule)
    return rule


def with_rules(policy: Policy | None, rules: Sequence[Rule]) -> Policy:
    """The policy with these rules after its own; without one, a policy of these rules alone.

    Raises:
        UsageError: there is no rule at all, two are called the same, or a limit decides without looking.
    """
    if policy is None:
        if not rules:
            raise UsageError("there is nothing to judge by: name a file or preset with --policy, or limits with --max")
        policy = Policy(policy=Settings(name=COMMAND_LINE), rules=tuple(rules))
        check_rules(policy, COMMAND_LINE)
        return policy
    return policy.extended(rules) if rules else policy


def _whole(name: str) -> str:
    """The one metric that begins with these letters; the name itself where none or several do."""
    from evalgate.metrics import registry

    found = [known for known in registry() if known.startswith(name)]
    return found[0] if len(found) == 1 and name not in registry() and name else name


def _number(text: str, whole: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = nan
    if not isfinite(number):
        raise UsageError(f"'{whole}' has no number after =: write METRIC=VALUE, as in kl=0.01")
    return number
