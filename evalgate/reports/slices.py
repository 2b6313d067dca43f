"""One metric by slice, as text: where did it break?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from evalgate.printable import printable
from evalgate.reports import Report
from evalgate.reports._numbers import figure_text
from evalgate.reports._rich import columns

if TYPE_CHECKING:
    from evalgate.stats.slices import SliceTable

OUTSIDE = "  *"  # the interval does not contain the overall figure


def render(table: SliceTable) -> str:
    """A line per slice, worst first; * marks those whose interval does not contain the overall figure."""
    rows: list[tuple[str, ...]] = [
        (table.by, "documents", "positions", f"{table.metric} ({table.unit})", "interval", "share", "")
    ]
    for part in sorted(table.slices, key=lambda s: -s.figure.known):
        figure, (low, high) = part.figure, (part.figure.low, part.figure.high)
        text = figure_text(figure.known, figure.interval, unit=table.unit, documents=part.documents)
        share = "" if part.share is None else f"{part.share:.1%}"
        apart = (low is not None and low > table.overall) or (high is not None and high < table.overall)
        rows.append(
            (
                part.name,
                f"{part.documents:,}",
                f"{figure.n:,}",
                text.value,
                text.interval,
                share,
                OUTSIDE.strip() * apart,
            )
        )
    name, sure = printable(table.candidate), f"{table.confidence * 100:g} %"
    title = f"{table.metric} of {name} by {table.by}; {sure} that all intervals hold\n"
    foot = f"\noverall {table.overall:.5g}; * = the interval does not contain it\n"
    return title + columns(rows, right=(1, 2, 3, 5)) + foot


REPORT = Report("slices", render)
