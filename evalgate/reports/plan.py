"""How many documents limits need, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evalgate.printable import printable
from evalgate.reports import Report
from evalgate.reports._rich import columns

if TYPE_CHECKING:
    from evalgate.gate.plan import Plans


def render(document: Plans) -> str:
    """A line per limit."""
    rows = [("figure", "now", "limit", "points to", "documents needed", "at least", "at most", "in this run")]
    rows += [
        (
            plan.figure,
            f"{plan.value:.5g}",
            f"{plan.limit:.6g}",
            plan.verdict,
            _count(plan.documents),
            _count(plan.documents_low),
            _count(plan.documents_high),
            f"{plan.pilot_documents:,}",
        )
        for plan in document.plans
    ]
    return (
        f"{printable(document.candidate)}\n\n"
        + columns(rows, right=(1, 2, 4, 5, 6, 7))
        + f"\nDocuments like those of this run, for a verdict at {document.confidence * 100:g} % in "
        f"{document.power:.0%} of cases; at least and at most =\nwith the figure at either end of this run's 80 % "
        "interval. none = too close to the limit for 100,000 documents.\n"
    )


def _count(documents: int | None) -> str:
    return "none" if documents is None else f"{documents:,}"


REPORT = Report("plan", render)
