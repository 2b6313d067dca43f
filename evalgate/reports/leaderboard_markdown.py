"""The leaderboard as Markdown for a model card: one sentence, the table, the plot, and how it was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from evalgate.reports import Report
from evalgate.reports._leaderboard import (
    HEADINGS,
    SPEED,
    bits_text,
    bytes_text,
    counted_how,
    exactness,
    listed,
    measured,
    named,
    place_text,
    quantity_text,
    sentence,
    speed_text,
    ties,
)
from evalgate.reports._pareto import description, points
from evalgate.reports._verdicts import cell

if TYPE_CHECKING:
    from evalgate.leaderboard import Entry, Leaderboard

PLOT = "sweep.svg"


def render(board: Leaderboard) -> str:
    """The text, with a link to the plot beside it where there is one."""
    return "\n".join(_lines(board)) + "\n"


def _lines(board: Leaderboard) -> Iterator[str]:
    said = sentence(board, called=_code)
    yield f"{said[:1].upper() + said[1:]}."
    yield ""
    heads = [f"{HEADINGS['kl']} (nats)", HEADINGS["top1"], HEADINGS["ratio"], "size", "bits per weight", "tokens/s"]
    yield f"| | candidate | {' | '.join(heads)} |"
    yield "|--:|---|--:|--:|--:|--:|--:|--:|"
    yield from (_row(entry, board) for entry in board.measured)
    yield ""
    legend = [ties(board)] if ties(board) else []
    if any(entry.front for entry in board.entries):
        legend.append("In bold: no other candidate is both smaller and closer to the reference")
    if legend:
        yield f"{cell('. '.join(legend))}."
        yield ""
    if points(board):
        yield f"![{cell(description(board))}]({PLOT})"
        yield ""
    yield "How it was measured"
    yield ""
    made = f"{cell(board.evalgate_version)}, {cell(board.created)}"
    yield f"- evalgate {made}, reference {_code(board.reference.spec)}, KL {exactness(board)}"
    yield f"- {cell(measured(board))}"
    yield f"- intervals are {board.confidence:.0%}, over documents"
    for how, names in counted_how(board):
        yield f"- size of {listed(names, most=20, called=_code)}: {cell(how)}"
    if any(entry.speed is not None for entry in board.entries):
        yield f"- {cell(SPEED[:1].lower() + SPEED[1:])}"
    yield from (f"- {cell(note)}" for note in board.notes)
    failed = [entry for entry in board.entries if not entry.measured]
    if failed:
        yield ""
        yield "Not measured"
        yield ""
        yield from (f"- {_code(entry.name)}: {cell(entry.reason)}" for entry in failed)


def _row(entry: Entry, board: Leaderboard) -> str:
    name = f"**{_code(entry.name)}**" if entry.front else _code(entry.name)
    figures = [" ".join(part for part in quantity_text(entry, q, board) if part) for q in ("kl", "top1", "ratio")]
    size = [bytes_text(entry.size), bits_text(entry.size), speed_text(entry)]
    return f"| {' | '.join([place_text(entry), name, *figures, *size])} |"


def _code(name: str) -> str:
    """A name as code, where nothing is markup or a mention; one that would end the code is escaped instead."""
    shown = named(name)
    return cell(name) if "`" in shown or "|" in shown else f"`{shown}`"


REPORT = Report("sweep", render)
