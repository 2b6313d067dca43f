"""CSV: every figure of a run, one a row."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from io import StringIO
from typing import TYPE_CHECKING

from evalgate.printable import printable
from evalgate.reports import Report

if TYPE_CHECKING:
    from evalgate.summary import Comparison, Group, Summary

COLUMNS = (
    "candidate",
    "part",  # overall, or domain
    "group",
    "metric",
    "statistic",
    "value",
    "low",
    "high",
    "se",
    "confidence",
    "method",
    "exactness",
    "unit",
    "positions",
    "documents",
)
_FORMULA = ("=", "+", "-", "@", "\t")  # how a spreadsheet tells that a cell is to be computed


def render(summary: Summary) -> str:
    """A header and a row per candidate, group, metric and statistic.

    An empty cell is an end that is open or an error that is not known; where `method` is `none` there is no interval.
    Numbers have every digit. A name that a spreadsheet would compute has an apostrophe before it.
    """
    buffer = StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for comparison in summary.comparisons:
        for part, group in _groups(comparison):
            writer.writerows(_rows(comparison.candidate.spec, part, group))
    return buffer.getvalue()


def _groups(comparison: Comparison) -> Iterator[tuple[str, Group]]:
    yield "overall", comparison.overall
    yield from (("domain", domain) for domain in comparison.domains)


def _rows(candidate: str, part: str, group: Group) -> Iterator[tuple[object, ...]]:
    for name, metric in group.metrics.items():
        for statistic, figure in metric.statistics.items():
            interval = figure.interval
            ends = (interval.low, interval.high, figure.se)
            yield (
                _text(candidate),
                part,
                _text(group.name),
                name,
                statistic,
                repr(figure.value),
                *("" if end is None else repr(end) for end in ends),
                interval.confidence if interval.known else "",
                interval.method,
                metric.exactness,
                metric.unit,
                group.positions,
                group.documents,
            )


def _text(name: str) -> str:
    """A name on one line that no spreadsheet takes for a formula."""
    shown = printable(name)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown


REPORT = Report("summary", render)
