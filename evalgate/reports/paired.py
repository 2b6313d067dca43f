"""Two runs side by side, as text: did the new candidate beat the old one?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from evalgate.core import counted
from evalgate.printable import printable
from evalgate.reports import Report
from evalgate.reports._numbers import PERCENT_UNITS, figure_text, plain
from evalgate.reports._rich import columns

if TYPE_CHECKING:
    from evalgate.gate.compare import PairedMetric, PairedRuns


def render(pair: PairedRuns) -> str:
    """A line per metric with the paired difference, then McNemar's test."""
    rows = [("metric", "first", "second", "difference", "interval", "better"), *(_row(f) for f in pair.figures)]
    text = (
        f"first  {printable(pair.first)}\nsecond {printable(pair.second)}\n"
        f"{counted(pair.positions, 'position')} of "
        f"{counted(pair.documents, 'document')}, "
        f"difference = first - second, {pair.confidence * 100:g} % intervals over documents\n\n"
    )
    text += columns(rows, right=(1, 2, 3))
    if pair.agreement is not None:
        a = pair.agreement
        text += (
            f"\nReference's token picked by the first alone at {a.only_first:,} positions, by the second alone at "
            f"{a.only_second:,}.\nMcNemar p = {a.clustered_p:.3g} with documents as the unit "
            f"({a.exact_p:.3g} if every position were its own draw, which text is not)\n"
        )
    return text


def _row(figure: PairedMetric) -> tuple[str, ...]:
    scale, sign = (100.0, "%") if figure.unit in PERCENT_UNITS else (1.0, "")
    text = figure_text(figure.difference.known, figure.difference.interval, unit=figure.unit, documents=2)
    sides = (plain(value * scale) + sign for value in (figure.first, figure.second))
    winner = "" if figure.winner == "neither" else figure.winner
    return (figure.metric, *sides, text.value, text.interval or "unknown", winner)


REPORT = Report("compare", render)
