"""Verdicts as words: the value, interval and limit of a rule in one unit, and text that is safe in Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from evalgate.core import CANNOT_MEASURE, NOT_APPLICABLE
from evalgate.printable import printable
from evalgate.reports._numbers import PERCENT_UNITS, figure_text, interval_text, plain

if TYPE_CHECKING:
    from evalgate.gate.report import Change, GateReport, RuleVerdict

_ESCAPES = {
    **{sign: f"\\{sign}" for sign in "\\`*_{}[]#~"},
    "&": "&amp;",
    "<": "&lt;",
    ">": "&gt;",
    "|": "&#124;",
    "@": "@\u200b",
}
EMOJI = {"pass": "✅", "fail": "❌", "undecided": "❔", NOT_APPLICABLE: "➖", CANNOT_MEASURE: "⚠️"}


class RuleText(NamedTuple):
    """A rule's value, interval and limit."""

    value: str
    interval: str
    limit: str


def rule_text(rule: RuleVerdict) -> RuleText:
    """The numbers of a rule; fractions in percent."""
    limit = _limit(rule)
    if rule.verdict == NOT_APPLICABLE:
        return RuleText(NOT_APPLICABLE, "", limit)
    if rule.value is None:
        return RuleText("bounded", interval_text(rule.interval, unit=rule.unit), limit)
    text = figure_text(rule.value, rule.interval, unit=rule.unit, documents=rule.documents)
    return RuleText(text.value, text.interval, limit)


def change_text(change: Change) -> tuple[str, str, str]:
    """Value, baseline and signed difference with its interval."""
    scale, sign = _unit(change.unit)
    difference = figure_text(change.difference, change.interval, unit=change.unit, documents=2)
    lead = "+" if change.difference > 0 else ""
    return (
        plain(change.value * scale) + sign,
        plain(change.baseline * scale) + sign,
        f"{lead}{difference.value} {difference.interval}".strip(),
    )


def headline(report: GateReport) -> str:
    """The verdict in one line: `pass: 6 of 6 rules pass`, `fail: 4 of 6 rules pass, 1 fail, 1 undecided`."""
    if report.error is not None:
        return f"{report.verdict}: {report.error.message}"
    rules = [rule for candidate in report.candidates for rule in candidate.rules]
    passed = sum(rule.verdict == "pass" for rule in rules)
    if passed == len(rules):
        return f"{report.verdict}: {passed} of {len(rules)} rules pass"
    counts = {v: sum(r.verdict == v for r in rules) for v in ("fail", "undecided", NOT_APPLICABLE)}
    shown = ", ".join(f"{n} {v}" for v, n in counts.items() if n)
    by_policy = counts["undecided"] and not counts["fail"] and report.verdict != "undecided"
    settled = " by on_undecided" if by_policy else ""
    return f"{report.verdict}{settled}: {passed} of {len(rules)} rules pass, {shown}"


def explained(rule: RuleVerdict) -> bool:
    """Whether the verdict says too little without its reason: all but a pass that is proven."""
    return rule.verdict != "pass" or not rule.proven


def cell(text: str) -> str:
    """Text as one cell of a Markdown table: nothing in it is markup, a mention or a new line."""
    return "".join(_ESCAPES.get(c, c) for c in printable(" ".join(text.split())))


def _limit(rule: RuleVerdict) -> str:
    scale, sign = _unit(rule.unit)
    parts = [
        f"{word} {limit * scale:.6g}{sign}" for word, limit in ((">=", rule.min), ("<=", rule.max)) if limit is not None
    ]
    return ", ".join(parts)


def _unit(unit: str) -> tuple[float, str]:
    return (100.0, "%") if unit in PERCENT_UNITS else (1.0, "")
