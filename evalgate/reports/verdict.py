"""The gate's terminal report: one line per rule, and beneath it why it did not pass."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from evalgate.reports._numbers import count
from evalgate.reports._verdicts import change_text, headline, rule_text

if TYPE_CHECKING:
    from evalgate.gate.report import CandidateVerdict, GateReport, RuleVerdict

_COLORS = {"pass": "\x1b[32m", "fail": "\x1b[31m", "undecided": "\x1b[33m"}
_RESET = "\x1b[0m"
_MARGIN = 11  # columns of the verdict before each rule


def render(report: GateReport, *, width: int = 80, color: bool = False) -> str:
    """The block as text, no prose wider than `width` columns; escape sequences only with `color`."""
    lines = [f"====== evalgate gate: {_painted(report.verdict, report.verdict.upper(), color)} ======"]
    lines += _wrapped(_facts(report), width)
    for candidate in report.candidates:
        lines += ["", f"====== Candidate {_plain(candidate.candidate)}: {candidate.verdict} ======"]
        for rule in candidate.rules:
            lines += _rule(rule, width, color=color)
        lines += _changes(candidate)
    if report.notes:
        lines += ["", "====== Notes ======", *(line for note in report.notes for line in _bullet(note, width))]
    return "\n".join([*lines, "", headline(report)]) + "\n"


def _facts(report: GateReport) -> list[tuple[str, str]]:
    correction = ", Holm over the rules" if report.correction == "holm" else ""
    measured = f"{count(report.positions, 'position')} of {count(report.documents, 'document')} of {report.corpus}"
    facts = [
        ("policy", f"{report.policy} ({report.policy_hash[:16]}), {report.confidence * 100:g} %{correction}"),
        ("measured", measured),
    ]
    if report.reference:
        facts.append(("reference", report.reference))
    if report.baseline:
        facts.append(("baseline", report.baseline))
    if report.sequential:
        stopped = report.sequential
        facts.append(("stopped", f"after {stopped.documents} of {stopped.of} documents, order of seed {stopped.seed}"))
    return facts


def _rule(rule: RuleVerdict, width: int, *, color: bool) -> list[str]:
    text = rule_text(rule)
    name = rule.figure if rule.rule == rule.text else f"{rule.rule}: {rule.figure}"
    verdict = _painted(rule.verdict, f"{rule.verdict:<{_MARGIN}}", color)
    lines = [verdict + _plain(f"{name}  {text.value} {text.interval}  limit {text.limit}")]
    if rule.verdict != "pass":
        lines += textwrap.wrap(
            _plain(rule.reason), width, initial_indent=" " * _MARGIN, subsequent_indent=" " * _MARGIN
        )
    return lines


def _changes(candidate: CandidateVerdict) -> list[str]:
    if not candidate.changes:
        return []
    rows = [(f"{c.metric} {c.statistic}", *change_text(c)) for c in candidate.changes]
    rows.insert(0, ("against the baseline", "now", "before", "change"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return ["", *("  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows)]


def _wrapped(facts: list[tuple[str, str]], width: int) -> list[str]:
    margin = max(len(name) for name, _ in facts) + 2
    lines: list[str] = []
    for name, text in facts:
        lines += textwrap.wrap(_plain(text), width, initial_indent=name.ljust(margin), subsequent_indent=" " * margin)
    return lines


def _bullet(text: str, width: int) -> list[str]:
    return textwrap.wrap(_plain(text), width, initial_indent="- ", subsequent_indent="  ")


def _painted(verdict: str, text: str, color: bool) -> str:
    return f"{_COLORS[verdict]}{text}{_RESET}" if color else text


def _plain(text: str) -> str:
    """Text that cannot steer the terminal: control characters of names are shown as escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
