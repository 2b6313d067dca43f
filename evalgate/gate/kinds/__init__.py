"""Kinds of rules: what `against` takes in a policy, one file each.

A file of this folder that defines `KIND` is a kind, under the name that `KIND` gives itself. It says everything that
tells its rules from others: the keys they take, the figure and the limits they speak of, which verdicts they claim, and
where no verdict can be reached.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Literal

from evalgate.core import Figure, Limits, Verdict
from evalgate.errors import choose
from evalgate.gate.measures import verdict_of

if TYPE_CHECKING:
    from evalgate.gate.figures import Maker
    from evalgate.gate.measures import Measure
    from evalgate.gate.policy import Rule
    from evalgate.metrics import Metric, Statistic

Need = Literal["", "baseline", "floor"]
_LIMITS = ("max", "min", "max_ratio")


@dataclass(frozen=True)
class Sources:
    """What is known of the models before one is loaded. remote: the spec of one that is an endpoint, "" = none is."""

    remote: str = ""
    recorded: bool = False


class RuleKind(ABC):
    """One kind of rule. It has no state: what it says depends on the rule alone.

    needs: what a rule rests on besides the run. proves: the verdicts that are claims, each with its error rate; the
    others mean that nothing was shown. sequential: whether it can be followed document by document. means: what
    `policy explain` says of its rules beyond the general, "" = nothing.
    """

    name: str
    needs: Need = ""
    proves: tuple[Verdict, ...] = ("pass", "fail")
    sequential: bool = False
    means: str = ""

    def check_keys(self, rule: Rule) -> None:
        """Raise ValueError where the rule has other keys than this kind takes."""
        given = [name for name in _LIMITS if getattr(rule, name) is not None]
        if not given:
            raise ValueError("has no limit: give max or min")
        if rule.max_ratio is not None:
            raise ValueError('max_ratio stands alone and needs against = "baseline"')
        if rule.max is not None and rule.min is not None and rule.min > rule.max:
            raise ValueError(f"min {rule.min:g} is above max {rule.max:g}")

    def misfit(self, rule: Rule, metric: Metric, statistic: Statistic) -> str:
        """Why this kind has no such figure, and what to write; empty where it has."""
        return ""

    def idle(self, rule: Rule, metric: Metric, statistic: Statistic) -> str:
        """Why the limit decides without looking; empty where it does not."""
        return ""

    def advice(self, rule: Rule, metric: Metric, statistic: Statistic) -> str:
        """What a reader should know of a rule that is no mistake but hardly what was meant; empty = nothing."""
        return ""

    def refusal(self, rule: Rule, metric: Metric, statistic: Statistic, sources: Sources) -> str:
        """Why no measurement of such sources can pass the rule, and what to write instead; empty where one can."""
        return ""

    @abstractmethod
    def figure(self, name: str, rule: Rule) -> str:
        """The figure in words; `name`: metric, statistic and part."""

    def text(self, rule: Rule) -> str:
        """The rule in words."""
        high = rule.max if rule.max_ratio is None else rule.max_ratio
        if rule.min is None:
            return f"{rule.figure} <= {high:g}"
        return f"{rule.figure} >= {rule.min:g}" if high is None else f"{rule.min:g} <= {rule.figure} <= {high:g}"

    def limits(self, rule: Rule, metric: Metric) -> Limits:
        """What the figure has to keep."""
        return Limits(rule.min, rule.max)

    def unit(self, rule: Rule, metric: Metric) -> str:
        """The figure's unit."""
        return metric.unit

    @abstractmethod
    def measure(self, rule: Rule, maker: Maker) -> Measure:
        """The figure that the rule is held against. Raises UsageError where the run does not have it."""

    def verdict(self, measure: Measure, limits: Limits, found: Figure) -> Verdict:
        """The verdict that the figure gives at its interval's confidence."""
        return verdict_of(measure, limits, found)

    def reason(self, limits: Limits, found: Figure, verdict: Verdict) -> str:
        """Why, in the words of this kind; empty where the general words do."""
        return ""


def get(name: str) -> RuleKind:
    """The kind of that name. Raises ValueError naming those there are."""
    if name not in kinds():
        raise ValueError(f"there is no {name!r}: {choose(name, kinds())}")
    return kinds()[name]


def kinds() -> Mapping[str, RuleKind]:
    """Every kind by name, `limit` first."""
    return _found(tuple(__path__))


@cache
def _found(path: tuple[str, ...]) -> Mapping[str, RuleKind]:
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(path)]
    found = [module.KIND for module in modules if hasattr(module, "KIND")]
    return {kind.name: kind for kind in sorted(found, key=lambda kind: (bool(kind.needs), kind.name))}
