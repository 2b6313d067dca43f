"""The leaderboard with every interval, what was told apart by how much, and how sizes were counted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from evalgate.reports import Report
from evalgate.reports._leaderboard import (
    HEADINGS,
    SPEED,
    bits_text,
    bytes_text,
    counted_how,
    listed,
    measured,
    place_text,
    quantity_text,
    sentence,
    speed_text,
    ties,
)
from evalgate.reports._numbers import figure_text
from evalgate.reports._rich import block, fact_table, new_table, printed, safe, title

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from evalgate.leaderboard import Leaderboard


def render(board: Leaderboard, *, width: int = 80, color: bool = False) -> str:
    """Everything as text, no line wider than `width` columns; escape sequences only with `color`."""
    return printed(_parts(board), width=width, color=color)


def _parts(board: Leaderboard) -> Iterable[RenderableType]:
    yield title(f"evalgate sweep against {board.reference.spec}")
    yield safe(f"{sentence(board)}.")
    yield safe("")
    yield _figures(board)
    if ties(board):
        yield safe(f"{ties(board)}.")
    yield title("Sizes and speeds")
    yield _sizes(board)
    yield fact_table([(listed(names, most=20), how) for how, names in counted_how(board)])
    yield safe(f"{SPEED}.")
    if board.pairs:
        yield title("Mean KL of pairs, first minus second")
        yield _pairs(board)
    failed = [entry for entry in board.entries if not entry.measured]
    if failed:
        yield title("Not measured")
        yield fact_table([(entry.name, entry.reason) for entry in failed])
    yield title("Measured")
    yield safe(f"{measured(board)}; evalgate {board.evalgate_version}, {board.created}, {board.seconds:,.0f} s.")
    yield fact_table([("-", note) for note in board.notes])


def _figures(board: Leaderboard) -> Table:
    table = new_table(header=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("candidate", overflow="fold")
    for heading in HEADINGS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in board.measured:
        texts = [quantity_text(entry, name, board) for name in HEADINGS]
        stacked = [block("\n".join(part for part in text if part)) for text in texts]
        table.add_row(safe(place_text(entry)), safe(entry.name), *stacked)
    return table


def _sizes(board: Leaderboard) -> Table:
    table = new_table(header=True)
    table.add_column("candidate", overflow="fold")
    for heading in ("size", "bits", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("types", overflow="fold")
    for entry in board.measured:
        size = entry.size
        types = "" if size is None else ", ".join(f"{kind} {n / size.bytes:.0%}" for kind, n in size.types.items())
        table.add_row(*map(safe, (entry.name, bytes_text(size), bits_text(size), speed_text(entry), types)))
    return table


def _pairs(board: Leaderboard) -> Table:
    table = new_table(header=True)
    for heading in ("first", "second"):
        table.add_column(heading, overflow="fold")
    for heading in ("difference", "better"):
        table.add_column(heading, justify="right", overflow="fold")
    for pair in board.pairs:
        said = "-"
        if pair.difference is not None:
            text = figure_text(pair.difference.value, pair.difference.interval, unit="", documents=board.documents)
            said = f"{text.value} {text.interval}"
        better = {"first": pair.first, "second": pair.second, "neither": "tied"}[pair.better]
        table.add_row(*map(safe, (pair.first, pair.second, said, better)))
    return table


REPORT = Report("sweep", render, terminal=True)
