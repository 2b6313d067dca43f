"""A pull-request comment in Markdown: verdict, rules, and the change against the baseline.

Its first line is a marker that only HTML readers do not see; a workflow finds its own comment by it and replaces it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from evalgate.core import NOT_APPLICABLE, counted
from evalgate.reports import Report
from evalgate.reports._verdicts import EMOJI, cell, change_text, explained, headline, rule_text

if TYPE_CHECKING:
    from evalgate.gate.report import CandidateVerdict, GateReport

MAX_BYTES = 64_000  # GitHub takes 65,536 characters
_ORDER = ("fail", "undecided", "pass", NOT_APPLICABLE)
_CUT = "\n_Cut to fit: the rest is in the run folder._\n"


def marker(report: GateReport) -> str:
    """The line by which the comment of this policy is found again."""
    name = "".join(c if c.isalnum() or c in " ." else "-" for c in report.policy)
    return f"<!-- evalgate: {re.sub('-+', '-', name)} -->"


def render(report: GateReport, *, max_bytes: int = MAX_BYTES) -> str:
    """The comment, at most `max_bytes` of UTF-8; lines that do not fit are left out, with a remark."""
    text = ""
    for line in _lines(report):
        if len((text + line + "\n" + _CUT).encode()) > max_bytes:
            return text + _CUT
        text += line + "\n"
    return text


def _lines(report: GateReport) -> Iterator[str]:
    yield marker(report)
    yield f"### {EMOJI[report.verdict]} evalgate: {cell(headline(report))}"
    yield ""
    if report.error is not None:
        yield f"Policy **{cell(report.policy)}**: there is no verdict on the candidates. Figures of an earlier"
        yield "comment no longer count."
        return
    reference = f" against {cell(report.reference)}" if report.reference else ""
    measured = f"{counted(report.documents, 'document')} and {counted(report.positions, 'position')}"
    yield (
        f"Policy **{cell(report.policy)}**{reference}, {measured} of "
        f"{cell(report.corpus)}, {report.confidence * 100:g} % intervals"
        + (", Holm over the rules." if report.correction == "holm" else ".")
    )
    for candidate in report.candidates:
        yield from _candidate(candidate)
    if report.notes:
        yield ""
        yield from (f"- {cell(note)}" for note in report.notes)


def _candidate(candidate: CandidateVerdict) -> Iterator[str]:
    yield ""
    yield f"#### {EMOJI[candidate.verdict]} {cell(candidate.candidate)}"
    yield ""
    if candidate.headline:
        yield cell(candidate.headline)
        yield ""
    yield "| | rule | figure | interval | limit |"
    yield "|---|---|---|---|---|"
    for rule in sorted(candidate.rules, key=lambda r: _ORDER.index(r.verdict)):
        text = rule_text(rule)
        name = rule.figure if rule.rule == rule.text else rule.rule
        cells = (name, text.value, text.interval, text.limit)
        yield f"| {EMOJI[rule.verdict]} | {' | '.join(cell(c) for c in cells)} |"
    reasons = [rule for rule in candidate.rules if explained(rule)]
    if reasons:
        yield ""
        yield from (f"- {EMOJI[rule.verdict]} {cell(rule.rule)}: {cell(rule.reason)}" for rule in reasons)
    if candidate.changes:
        yield ""
        yield "| against the baseline | now | before | change |"
        yield "|---|---|---|---|"
        for change in candidate.changes:
            cells = (f"{change.metric} {change.statistic}", *change_text(change))
            yield f"| {' | '.join(cell(c) for c in cells)} |"


REPORT = Report("gate", render, file="Write a pull-request comment in Markdown.")
