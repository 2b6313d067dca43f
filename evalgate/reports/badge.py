"""A badge: the JSON that shields.io's endpoint badge reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evalgate.core import CANNOT_MEASURE
from evalgate.printable import printable
from evalgate.reports import Report
from evalgate.reports._numbers import plain
from evalgate.store.documents import dump

if TYPE_CHECKING:
    from evalgate.gate.report import GateReport, RuleVerdict

COLORS = {"pass": "brightgreen", "fail": "red", "undecided": "yellow", CANNOT_MEASURE: "lightgrey"}


def render(report: GateReport) -> str:
    """`{"schemaVersion": 1, "label": ..., "message": "pass, KL 0.0012", "color": ...}`."""
    rules = [rule for candidate in report.candidates for rule in candidate.rules]
    kl = next((rule for rule in rules if _is_mean_kl(rule)), None) if len(report.candidates) == 1 else None
    figure = "" if kl is None or kl.value is None else f", KL {plain(kl.value)}"
    body = {
        "schemaVersion": 1,
        "label": printable(f"evalgate {report.policy}"),
        "message": report.verdict + figure,
        "color": COLORS[report.verdict],
    }
    return dump(body, name="badge")


def _is_mean_kl(rule: RuleVerdict) -> bool:
    return rule.figure == "kl mean"


REPORT = Report("gate", render, file="Write the JSON of a shields.io endpoint badge.")
