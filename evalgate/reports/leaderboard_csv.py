"""The leaderboard as CSV: one row a candidate, figures unrounded, intervals in columns of their own."""

from __future__ import annotations

import csv
from io import StringIO
from typing import TYPE_CHECKING

from evalgate.printable import printable
from evalgate.reports import Report

if TYPE_CHECKING:
    from evalgate.leaderboard import Entry, Leaderboard, Quantity

QUANTITIES = ("kl", "top1", "ratio")
COLUMNS = (
    *("candidate", "spec", "best_place", "worst_place", "tied_with"),
    *(f"{name}{end}" for name in QUANTITIES for end in ("", "_low", "_high", "_exactness")),
    *("bytes", "parameters", "bits_per_weight", "counted", "tokens_per_second", "pareto", "run", "reason"),
)
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what spreadsheets run when a cell begins with it


def render(board: Leaderboard) -> str:
    """A header and a row a candidate; an empty cell is a value that is not known, or an open end."""
    sheet = StringIO()
    writer = csv.writer(sheet, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows(board):
        writer.writerow([_cell(value) for value in row])
    return sheet.getvalue()


def rows(board: Leaderboard) -> list[list[object]]:
    """The values of `COLUMNS` for every candidate, best first; None = not known."""
    return [_row(entry) for entry in board.entries]


def _row(entry: Entry) -> list[object]:
    place, size = entry.place, entry.size
    figures = [cell for name in QUANTITIES for cell in _quantity(getattr(entry, name))]
    return [
        *(entry.name, entry.spec),
        *((place.best, place.worst, ", ".join(place.tied)) if place else (None, None, None)),
        *figures,
        *((size.bytes, size.parameters, size.bits, size.counted) if size else (None,) * 4),
        *(entry.speed, entry.front if entry.measured else None, entry.run, entry.reason or None),
    ]


def _quantity(quantity: Quantity | None) -> list[object]:
    """Value, ends of the interval, and exactness; where only bounds are known the ends are theirs, without a value."""
    if quantity is None:
        return [None] * 4
    if quantity.value is not None:
        return [quantity.value.value, quantity.value.low, quantity.value.high, quantity.exactness]
    low, high = quantity.low, quantity.high
    return [None, low and low.low, high and high.high, quantity.exactness]


def _cell(value: object) -> object:
    """A value as a spreadsheet may read it: text that others wrote can neither steer anything nor be a formula."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return "" if value is None else repr(value)
    text = printable(value)
    return f"'{text}" if text.startswith(_FORMULA) else text


REPORT = Report("sweep", render)
