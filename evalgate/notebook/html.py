"""A run's headline as HTML, for notebooks: plain elements that take the notebook's own style, and nothing loaded."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from evalgate.core import counted
from evalgate.printable import printable
from evalgate.reports._headline import headline
from evalgate.reports._numbers import figure_text
from evalgate.reports._words import HEADLINES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from evalgate.summary import Comparison, Group, Summary

_MOST_SENTENCES, _MOST_ROWS = 8, 50  # candidates that are shown


def run_html(summary: Summary) -> str:
    """What was compared, a sentence a candidate, and the figures that people quote with their intervals."""
    return "\n".join(_parts(summary))


def _parts(summary: Summary) -> Iterator[str]:
    shown = summary.comparisons[:_MOST_ROWS]
    against = f" against {_safe(summary.reference.spec)}" if summary.reference else ""
    overall = summary.comparisons[0].overall
    amount = f"{counted(overall.positions, 'position')} of {counted(overall.documents, 'document')}"
    yield f"<div><p><strong>evalgate {summary.kind}{against}</strong>: {amount}, {_safe(summary.corpus.name)}</p>"
    for one in shown[:_MOST_SENTENCES]:
        yield f"<p><code>{_safe(one.candidate.spec)}</code>: {_safe(headline(summary, one))}</p>"
    yield from _table(summary.kind, shown)
    left = len(summary.comparisons) - len(shown)
    if left:
        yield f"<p>and {counted(left, 'more candidate')}: see <code>run.summary</code></p>"
    if summary.notes:
        yield f"<details><summary>{counted(len(summary.notes), 'note')}</summary><ul>"
        yield from (f"<li>{_safe(note)}</li>" for note in summary.notes)
        yield "</ul></details>"
    yield "</div>"


def _table(kind: str, shown: list[Comparison]) -> Iterator[str]:
    """The figures of every candidate; one that no candidate has gets no column."""
    found = [h for h in HEADLINES[kind] if any(_cell(one.overall, h[0], h[1]) for one in shown)]
    yield "<table><thead><tr>"
    yield "".join(f'<th scope="col">{escape(name)}</th>' for name in ("candidate", *(name for _, _, name in found)))
    yield "</tr></thead><tbody>"
    for one in shown:
        cells = [_cell(one.overall, metric, statistic) or "-" for metric, statistic, _ in found]
        name = f'<th scope="row">{_safe(one.candidate.spec)}</th>'
        yield f"<tr>{name}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    yield "</tbody></table>"


def _cell(group: Group, name: str, statistic: str) -> str:
    """A figure with its interval; its lower bound where no more is known; empty where the group does not have it."""
    metric = group.metrics.get(name)
    if metric is None:
        return ""
    figure, bound = metric.statistics.get(statistic), metric.statistics.get(f"{statistic}_low")
    one = figure or bound
    if one is None:
        return ""
    text = figure_text(one.value, one.interval, unit=metric.unit, documents=group.documents)
    value = text.value if figure is not None else f"at least {text.value}"
    how = "" if metric.exactness == "exact" else f"<br><small>{metric.exactness}</small>"
    return f"{escape(value)}<br><small>{escape(text.interval)}</small>{how}"


def _safe(text: str) -> str:
    return escape(printable(text))
