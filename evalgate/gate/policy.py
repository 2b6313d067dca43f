"""Policies: the limits that a candidate has to keep, as a TOML file.

    [policy]
    name = "8-bit weights"
    confidence = 0.95

    [[rules]]
    metric = "kl"
    statistic = "p99"
    max = 0.05
    slice = {by = "domain", name = "code"}

Unknown keys are refused by name; every rule is checked against the metrics that exist before anything is measured.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from evalgate.core import Verdict
from evalgate.errors import UsageError, choose, closest
from evalgate.gate import kinds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from evalgate.metrics import Metric, Statistic

Unit = Literal["documents", "batches"]
COMMAND_LINE = "command line"  # name of a policy that was not read from a file
PRESETS = ("lossless", "8bit", "4bit")
_PRESET_FOLDER = Path(__file__).parent / "presets"
_WRITTEN_NAME = re.compile(r'\A(?:(?!\[\[)[^\n]*\n)*?\s*name\s*=\s*"([^"\\\n]+)"')  # before the first rule
_PERCENTILE = re.compile(r"p(\d{1,2}(\.\d+)?)")


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class Slice(_Table):
    """A part of the positions: one part of a cut that `evalgate slices` makes."""

    by: Literal["domain", "position", "entropy", "token", "document"] = Field(description="the cut")
    name: str = Field(min_length=1, description="the part, as `evalgate slices` names it")


class Rule(_Table):
    """One limit on one figure.

    against: the kind of rule, which says what `max` and `min` speak of; one file each in evalgate.gate.kinds. "limit":
    the figure itself. "baseline": the candidate's figure minus that of the baseline run, on the same positions.
    "regression": the same, and it fails only where worse is proven. "floor": how far the figure is worse than the noise
    floor.
    """

    metric: str = Field(description="the metric's name")
    statistic: str = Field(default="mean", description="a statistic of the metric, or any percentile: p99, p99.9")
    against: str = Field(default="limit", description="what max and min speak of: limit, baseline, regression or floor")
    max: float | None = Field(default=None, description="pass needs the whole interval at or below it")
    min: float | None = Field(default=None, description="pass needs the whole interval at or above it")
    max_ratio: float | None = Field(
        default=None, gt=0, description="against the baseline: candidate's figure divided by the baseline's"
    )
    slice: Slice | None = Field(default=None, description="only positions of this part")
    name: str | None = Field(default=None, min_length=1, description="what reports call the rule")
    on_undecided: Verdict | None = Field(default=None, description="what it counts as when undecided; as in [policy]")

    @model_validator(mode="after")
    def _consistent(self) -> Rule:
        self.kind.check_keys(self)
        return self

    @field_validator("against")
    @classmethod
    def _known(cls, name: str) -> str:
        return kinds.get(name).name

    @property
    def kind(self) -> kinds.RuleKind:
        """What tells rules against this from others."""
        return kinds.get(self.against)

    @property
    def label(self) -> str:
        """What reports call it."""
        return self.name or self.text

    @property
    def domain(self) -> str | None:
        """The domain whose positions are meant, None where another part or all are."""
        return self.slice.name if self.slice is not None and self.slice.by == "domain" else None

    @property
    def figure(self) -> str:
        """The figure in words: `kl p99 in domain code`."""
        place = "" if self.slice is None else f" in {self.slice.by} {self.slice.name}"
        return self.kind.figure(f"{self.metric} {self.statistic}{place}", self)

    @property
    def text(self) -> str:
        """The rule in words: `kl p99 in domain code <= 0.05`."""
        return self.kind.text(self)


class Settings(_Table):
    """How the rules are judged."""

    name: str = Field(default="policy", description="what reports call the policy, and find their comment again by")
    confidence: float = Field(default=0.95, gt=0, lt=1, description="of the intervals that decide")
    on_undecided: Verdict = Field(
        default="undecided", description="what an undecided rule counts as, where it does not say so itself"
    )
    correction: Literal["none", "holm"] = Field(
        default="none", description="holm: the verdicts of all rules on all candidates hold together"
    )
    population: Literal["documents", "corpus"] = Field(
        default="documents", description="what verdicts speak of: documents like these, or these documents alone"
    )
    baseline: Literal["required", "optional"] = Field(
        default="required",
        description="optional: where there is no baseline run yet, the rules that need one are not applicable",
    )
    noise_floor: bool = Field(default=True, description="measure the noise floor before judging")
    clip: float | None = Field(
        default=None,
        gt=1,
        description="how many distances from the ideal figure to its limit a document counts at most for a pass; "
        "null: 3 with up to 24 documents, and more with more",
    )
    unit: Unit = Field(
        default="documents",
        description="what a verdict rests on; batches: of one text, stretches of it, of which it then speaks",
    )


class Policy(_Table):
    """A whole policy file."""

    policy: Settings = Settings()
    rules: tuple[Rule, ...] = Field(min_length=1, strict=False)  # TOML has lists

    @property
    def needs_baseline(self) -> bool:
        """Whether a rule compares with a baseline run."""
        return any(rule.kind.needs == "baseline" for rule in self.rules)

    @property
    def needs_floor(self) -> bool:
        """Whether a rule compares with the noise floor."""
        return any(rule.kind.needs == "floor" for rule in self.rules)

    def settled(self, rule: Rule, verdict: Verdict) -> Verdict:
        """What a rule's verdict counts as: an undecided one as the rule or else the policy says."""
        return (rule.on_undecided or self.policy.on_undecided) if verdict == "undecided" else verdict

    def extended(self, rules: Sequence[Rule]) -> Policy:
        """The policy with more rules. Raises UsageError where two rules are called the same."""
        policy = self.model_copy(update={"rules": (*self.rules, *rules)})
        check_rules(policy, self.policy.name)
        return policy

    def optional_baseline(self) -> Policy:
        """The policy with baseline = "optional"."""
        return self.model_copy(update={"policy": self.policy.model_copy(update={"baseline": "optional"})})


def load_policy(source: str | Path) -> Policy:
    """The policy of a TOML file, or of a preset named `lossless`, `8bit` or `4bit`; a file of that name goes first.

    Raises:
        UsageError: there is no such file, it is not TOML, or a key or rule is wrong; names file and key.
    """
    return parse_policy(policy_text(source), name=str(source))


def policy_text(source: str | Path) -> str:
    """The TOML text of a policy file or preset; raises UsageError where there is none."""
    path = Path(source)
    if str(source) in PRESETS and not path.exists():
        path = _PRESET_FOLDER / f"policy-{source}.toml"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        close = closest(path.name, [*PRESETS, *_beside(path)])
        alike = close if close in PRESETS or close is None else str(path.parent / close)
        said = f"write one with `evalgate policy init`, or name a preset ({', '.join(PRESETS)})"
        raise UsageError(
            f"there is no policy file {source}: {said if alike is None else f'did you mean {alike}?'}", file=str(source)
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the policy file {source}: {error}", file=str(source)) from error


def _beside(path: Path) -> list[str]:
    """The TOML files where a missing one was looked for."""
    try:
        return [other.name for other in path.parent.glob("*.toml")]
    except OSError:
        return []


def parse_policy(text: str, *, name: str) -> Policy:
    """The policy that a TOML text holds; `name` is what errors call it. Raises UsageError."""
    try:
        document = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or a number of thousands of digits
        raise UsageError(f"{name} is not TOML: {error}", file=name) from error
    except RecursionError:
        raise UsageError(f"{name} is not TOML: it nests too deeply", file=name) from None
    try:
        policy = Policy.model_validate(document)
    except ValidationError as error:
        raise _refusal(error, name) from error
    check_rules(policy, name)
    return policy


def check_rules(policy: Policy, name: str) -> None:
    """Refuse rules on figures that do not exist, limits that decide without looking, and two rules of one name.

    Raises UsageError, whose message begins with `name`.
    """
    for number, rule in enumerate(policy.rules, 1):
        try:
            if said := rule.kind.idle(rule, *resolve(rule)):
                raise UsageError(said)
        except UsageError as error:
            raise UsageError(f"{name}: rule {number}: {error.message}", file=name, rule=number) from error
    _check_distinct(policy, name)


def advice(policy: Policy) -> list[str]:
    """A sentence for each rule that is no mistake but hardly does what was meant."""
    found = [(rule, rule.kind.advice(rule, *resolve(rule))) for rule in policy.rules]
    return [f"rule {rule.label!r} {said}" for rule, said in found if said]


def policy_name(source: str | Path | None) -> str:
    """What the policy of a file calls itself, as far as the file can be read: a policy that is refused keeps its name,
    by which a pull request's comment is found again."""
    if source is None:
        return COMMAND_LINE
    try:
        document = tomllib.loads(policy_text(source))
        return Settings.model_validate({"name": document["policy"]["name"]}).name
    except tomllib.TOMLDecodeError:
        written = _WRITTEN_NAME.search(policy_text(source))
        return written[1] if written else Settings().name
    except (UsageError, ValidationError, KeyError, TypeError):
        return Settings().name


def resolve(rule: Rule) -> tuple[Metric, Statistic]:
    """The metric and the statistic that a rule names; any percentile pN of the metric's primary series counts.

    Raises:
        UsageError: there is no such metric or statistic, or no limit can rest on it.
    """
    from evalgate.metrics import Statistic, get, registry

    if rule.metric not in registry():
        raise UsageError(f"there is no metric {rule.metric!r}: {choose(rule.metric, registry())}")
    metric = get(rule.metric)
    known = {s.name: s for s in metric.statistics}
    percentile = _PERCENTILE.fullmatch(rule.statistic)
    if rule.statistic in known:
        found = known[rule.statistic]
    elif percentile and 0 < float(percentile[1]) < 100:
        found = Statistic(rule.statistic, "percentile", series=metric.primary, level=float(percentile[1]))
    else:
        raise UsageError(f"{rule.metric} has no statistic {rule.statistic!r}: {choose(rule.statistic, known)}")
    if found.kind in ("min", "max"):
        extreme = "p99.9" if found.kind == "max" else "p0.1"
        raise UsageError(
            f"the {found.kind} of {rule.metric} drifts with the number of positions: set a limit on {extreme}"
        )
    if found.kind == "correlation":
        raise UsageError("a correlation has no interval that keeps its error rate: set a limit on log_ratio")
    if found.kind == "sampling":
        raise UsageError(f"{rule.statistic} says how well {rule.metric} is known, not how large it is: use mean")
    if said := rule.kind.misfit(rule, metric, found):
        raise UsageError(said)
    return metric, found


def _check_distinct(policy: Policy, name: str) -> None:
    seen: dict[str, int] = {}
    for number, rule in enumerate(policy.rules, 1):
        label = rule.label
        if label in seen:
            raise UsageError(
                f"{name}: rules {seen[label]} and {number} are both called {label!r}: give them different names",
                file=name,
            )
        seen[label] = number


def _refusal(error: ValidationError, name: str) -> UsageError:
    """The first complaint as one sentence that names file, rule and key."""
    errors = error.errors()
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    place = [str(part + 1) if isinstance(part, int) else part for part in first["loc"]]
    where = " ".join("rule" if part == "rules" and len(place) > 1 else part for part in place)
    if first["type"] == "extra_forbidden":
        key = str(first["loc"][-1])
        if key == "domain":
            part = f'slice = {{by = "domain", name = {json.dumps(str(first["input"]), ensure_ascii=False)}}}'
            return UsageError(f"{name}: there is no key {where}: write {part}", file=name, key=key)
        return UsageError(f"{name}: there is no key {where}: {choose(key, _keys(first['loc']))}", file=name, key=key)
    if where == "rules" and first["type"] in ("missing", "too_short"):
        needed = "write one under [[rules]], or start from `evalgate policy init`"
        return UsageError(f"{name} has no rule: {needed}", file=name, key=where)
    if first["type"] == "missing":
        return UsageError(f"{name}: {where} is missing: add the key", file=name, key=where)
    message = first["msg"].removeprefix("Value error, ")
    return UsageError(f"{name}: {f'{where}: ' if where else ''}{_sentence(message)}", file=name, key=where)


def _keys(place: tuple[int | str, ...]) -> Mapping[str, object]:
    """The keys that the table at this place may have."""
    if len(place) == 1:
        return Policy.model_fields
    if place[0] == "policy":
        return Settings.model_fields
    return Slice.model_fields if "slice" in place[:-1] else Rule.model_fields


def _sentence(message: str) -> str:
    return message[:1].lower() + message[1:]
