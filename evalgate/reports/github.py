"""What GitHub Actions shows of a gate: annotations, outputs of the step, and a step summary.

Annotations are workflow commands, one line each. The step summary is `comment.py`'s Markdown: the command appends it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from evalgate.printable import printable
from evalgate.reports._verdicts import headline, rule_text

if TYPE_CHECKING:
    from evalgate.gate.report import GateReport

MAX_SUMMARY_BYTES = 1_000_000  # GitHub takes 1 MiB a step
MAX_ANNOTATIONS = 9  # GitHub shows 10 errors and 10 warnings a step


def workflow_commands(report: GateReport) -> str:
    """A notice with each candidate's headline; then one for a pass, or an error per failed rule and a warning per
    undecided one, MAX_ANNOTATIONS in all.

    Where nothing could be measured, one error says why.
    """
    if report.error is not None:
        return _command("error", f"evalgate {report.verdict}", report.error.message)
    rules = [(c.candidate, r) for c in report.candidates for r in c.rules if r.verdict in ("fail", "undecided")]
    rules.sort(key=lambda pair: pair[1].verdict != "fail")
    said = [c for c in report.candidates if c.headline][:MAX_ANNOTATIONS]
    lines = [_command("notice", f"evalgate: {c.candidate}", c.headline) for c in said]
    for candidate, rule in rules[:MAX_ANNOTATIONS]:
        text = rule_text(rule)
        title = f"evalgate {rule.verdict}: {candidate}"
        message = f"{rule.rule}: {text.value} {text.interval}, limit {text.limit}; {rule.reason}"
        lines.append(_command("error" if rule.verdict == "fail" else "warning", title, message))
    if len(rules) > MAX_ANNOTATIONS:
        message = f"{len(rules) - MAX_ANNOTATIONS} more rules did not pass: see the step summary"
        lines.append(_command("notice", "evalgate", message))
    if not rules:
        lines.append(_command("notice", "evalgate", headline(report)))
    return "".join(lines)


def outputs(report: GateReport) -> str:
    """Lines for $GITHUB_OUTPUT: verdict, exit-code, headline."""
    return f"verdict={report.verdict}\nexit-code={report.exit_code}\nheadline={printable(headline(report))}\n"


def _command(kind: str, title: str, message: str) -> str:
    return f"::{kind} title={_property(title)}::{_data(message)}\n"


def _data(text: str) -> str:
    return printable(text, lines=True).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
