"""The leaderboard of a sweep on a terminal: one candidate in two lines, best first, ties as ranges of places."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from evalgate.reports import Report
from evalgate.reports._leaderboard import (
    HEADINGS,
    bits_text,
    bytes_text,
    measured,
    place_text,
    quantity_text,
    sentence,
    speed_text,
    ties,
)
from evalgate.reports._numbers import BRIEF
from evalgate.reports._rich import block, fact_table, new_table, printed, safe, title

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from evalgate.leaderboard import Leaderboard

FRONT = "*"


def render(board: Leaderboard, *, width: int = 80, color: bool = False) -> str:
    """The table as text, no line wider than `width` columns; escape sequences only with `color`."""
    return printed(_parts(board), width=width, color=color)


def _parts(board: Leaderboard) -> Iterable[RenderableType]:
    yield title(f"evalgate sweep against {board.reference.spec}")
    yield safe(f"{sentence(board)}.")
    yield safe("")
    yield _table(board)
    said = ties(board)
    if said:
        yield safe(f"\n{said}.".lstrip("\n"))
    if any(entry.front for entry in board.entries):
        yield safe(f"{FRONT} no other candidate is both smaller and closer to the reference.")
    yield safe(f"Measured: {measured(board)}.")
    failed = [entry for entry in board.entries if not entry.measured]
    if failed:
        yield title("Not measured")
        yield fact_table([(entry.name, entry.reason) for entry in failed])
    if board.notes:
        yield title("Notes")
        yield fact_table([("-", note) for note in board.notes])


def _table(board: Leaderboard) -> Table:
    table = new_table(header=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("candidate", overflow="fold", min_width=10)
    table.add_column(HEADINGS["kl"], justify="right", no_wrap=True)
    for name in ("top1", "ratio"):
        table.add_column(HEADINGS[name].replace(" ", "\n"), justify="right", no_wrap=True)
    for heading in ("size ", "bits", "tok/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in board.measured:
        kl, top1, ratio = (quantity_text(entry, name, board, digits=BRIEF) for name in ("kl", "top1", "ratio"))
        table.add_row(
            safe(place_text(entry)),
            safe(entry.name),
            block("\n".join(part for part in kl if part)),
            safe(top1.value),
            safe(ratio.value),
            safe(bytes_text(entry.size) + (FRONT if entry.front else " ")),
            safe(bits_text(entry.size)),
            safe(speed_text(entry)),
        )
    return table


REPORT = Report("sweep", render, terminal=True)
