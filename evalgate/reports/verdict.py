"""The gate's terminal report: one line per rule, and beneath it why it did not pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from evalgate.core import CANNOT_MEASURE, NOT_APPLICABLE, counted
from evalgate.printable import printable
from evalgate.reports import Report
from evalgate.reports._rich import block, columns, fact_table, printed, safe, title
from evalgate.reports._verdicts import change_text, explained, headline, rule_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from evalgate.gate.report import CandidateVerdict, GateReport, RuleVerdict

_COLORS = {"pass": "green", "fail": "red", "undecided": "yellow", NOT_APPLICABLE: "cyan", CANNOT_MEASURE: "red"}
_MARGIN = 11  # fewest columns of the verdict before each rule


def render(report: GateReport, *, width: int = 80, color: bool = False) -> str:
    """The block as text, no prose wider than `width` columns; escape sequences only with `color`."""
    return printed(_parts(report), width=width, color=color)


def _parts(report: GateReport) -> Iterable[RenderableType]:
    from rich.text import Text

    verdict = safe(report.verdict.upper(), _COLORS[report.verdict])
    yield title(Text.assemble("evalgate gate: ", verdict))
    yield fact_table(_facts(report))
    for candidate in report.candidates:
        yield title(f"Candidate {candidate.candidate}: {candidate.verdict}")
        if candidate.headline:
            yield safe(candidate.headline)
            yield block("")
        margin = max(_MARGIN, *(len(rule.verdict) + 2 for rule in candidate.rules))
        for rule in candidate.rules:
            yield from _rule(rule, margin)
        yield from _changes(candidate)
    if report.notes:
        yield title("Notes")
        yield fact_table([("-", note) for note in report.notes])
    yield block(f"\n{printable(headline(report))}")


def _facts(report: GateReport) -> list[tuple[str, str]]:
    correction = ", Holm over the rules" if report.correction == "holm" else ""
    measured = f"{counted(report.positions, 'position')} of {counted(report.documents, 'document')} of {report.corpus}"
    found = [
        ("policy", f"{report.policy} ({report.policy_hash[:16]}), {report.confidence * 100:g} %{correction}"),
        ("measured", measured),
    ]
    if report.reference:
        found.append(("reference", report.reference))
    if report.baseline:
        found.append(("baseline", report.baseline))
    if report.sequential:
        stopped = report.sequential
        found.append(
            ("stopped", f"after {stopped.documents} of {counted(stopped.of, 'document')}, order of seed {stopped.seed}")
        )
    return found


def _rule(rule: RuleVerdict, margin: int) -> Iterable[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    said = rule_text(rule)
    name = rule.figure if rule.rule == rule.text else f"{rule.rule}: {rule.figure}"
    verdict = safe(rule.verdict.ljust(margin), _COLORS[rule.verdict])
    figure = safe(f"{name}  {said.value} {said.interval}  limit {said.limit}")
    yield Text.assemble(verdict, figure, no_wrap=True, overflow="ignore")
    if explained(rule):
        yield Padding(safe(" ".join(rule.reason.split())), (0, 0, 0, margin))


def _changes(candidate: CandidateVerdict) -> Iterable[RenderableType]:
    if candidate.changes:
        rows = [(f"{c.metric} {c.statistic}", *change_text(c)) for c in candidate.changes]
        grid = columns([("against the baseline", "now", "before", "change"), *rows])
        yield block(f"\n{grid}".rstrip("\n"))


REPORT = Report("gate", render, terminal=True)
