"""What reports of a sweep share: figures as text, the sentence above the table, and how it was measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from evalgate.core import counted
from evalgate.printable import printable
from evalgate.reports._numbers import BRIEF, FULL, Digits, FigureText, figure_text, interval_text

if TYPE_CHECKING:
    from evalgate.core import Interval
    from evalgate.leaderboard import Entry, Leaderboard, Quantity, Size

UNITS = {"kl": "", "top1": "fraction", "ratio": ""}
HEADINGS = {"kl": "mean KL", "top1": "same top-1", "ratio": "PPL ratio"}
SPEED = (
    "Tokens a second are those of the candidate's own forward pass and output head while windows were scored here, "
    "on this machine and in the types it computes in: not of generation, and not of another engine"
)
_LONGEST = 60  # characters of a name in a sentence


def quantity_text(entry: Entry, name: str, board: Leaderboard, *, digits: Digits = FULL) -> FigureText:
    """Value and interval of `kl`, `top1` or `ratio`; a bounded one with the sign of its bound, an unknown one `-`."""
    quantity: Quantity | None = getattr(entry, name)
    if quantity is None:
        return FigureText("-", "")
    if quantity.value is not None:
        return _text(quantity.value.value, quantity.value.interval, name, board, digits)
    low, high = quantity.low, quantity.high
    assert low is not None  # a quantity has a value or a lower bound
    text = _text(low.value, low.interval, name, board, digits)
    outer = low.interval.between(low.low, None if high is None else high.high)
    return FigureText(f">= {text.value}", interval_text(outer, unit=UNITS[name], digits=digits) if outer.known else "")


def _text(value: float, interval: Interval, name: str, board: Leaderboard, digits: Digits) -> FigureText:
    return figure_text(value, interval, unit=UNITS[name], documents=board.documents, digits=digits)


def place_text(entry: Entry) -> str:
    """`1`, or `1-3` where it cannot be told from others; `-` where it is not ranked."""
    return "-" if entry.place is None else entry.place.text


def bytes_text(size: Size | None) -> str:
    """`246.6 MB`: decimal units, as file managers and the hub show them."""
    return "-" if size is None else data_text(size.bytes)


def data_text(count: float) -> str:
    """Bytes in decimal units, four digits at most."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 999.95 and len(units) > 1:
        count /= 1000
        units.pop(0)
    unit = units[0]
    return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.{1 if count >= 9.995 else 2}f} {unit}"


def bits_text(size: Size | None) -> str:
    """Bits per weight."""
    return "-" if size is None or size.bits is None else f"{size.bits:.2f}"


def speed_text(entry: Entry) -> str:
    """Tokens a second."""
    return "-" if entry.speed is None else f"{entry.speed:,.0f}" if entry.speed >= 10 else f"{entry.speed:.2g}"


def named(name: str) -> str:
    """A name in a sentence: on one line, and not longer than a line."""
    shown = printable(name)
    return shown if len(shown) <= _LONGEST else f"...{shown[3 - _LONGEST :]}"


def listed(names: list[str], *, most: int = 4, called: Callable[[str], str] = named) -> str:
    """`a`, `a and b`, `a, b and 3 more`."""
    shown = [called(name) for name in names]
    if len(shown) > most:
        return f"{', '.join(shown[: most - 1])} and {len(shown) - most + 1} more"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def sentence(board: Leaderboard, *, called: Callable[[str], str] = named) -> str:
    """What the sweep found. called: how a name is written; by default it is safe on a terminal, and no more."""
    ranked = [entry for entry in board.measured if entry.place is not None]
    if not ranked:
        return "no candidate could be ranked"
    best = ranked[0]
    kl = quantity_text(best, "kl", board, digits=BRIEF)
    ends = ", no interval: 1 document" if board.documents < 2 else f" {kl.interval}".rstrip()
    figure = kl.value.replace(">=", "at least") + ends
    clauses = [f"closest to {called(board.reference.spec)} is {called(best.name)} (mean KL {figure})"]
    place = best.place
    assert place is not None
    if place.tied:
        clauses.append(f"it cannot be told from {listed(place.tied, called=called)}")
    front = [entry for entry in board.measured if entry.front]
    smaller = [entry.name for entry in front if entry is not best]
    if smaller:
        clauses.append(f"nothing is both smaller and closer than {listed(smaller, called=called)}")
    failed = len(board.entries) - len(board.measured)
    if failed:
        clauses.append(f"{counted(failed, 'candidate')} could not be measured")
    return "; ".join(clauses)


def measured(board: Leaderboard) -> str:
    """What text was shown, and how it was cut."""
    corpus = board.corpus
    return (
        f"{counted(board.positions, 'position')} in {counted(board.windows, 'window')} of "
        f"{counted(board.documents, 'document')} ({named(corpus.name)}, hash {corpus.hash[:16]}), windows "
        f"{corpus.window_preset} of at most {counted(corpus.context, 'token')}"
    )


def ties(board: Leaderboard) -> str:
    """What a range of places means."""
    if not any(entry.place is not None and entry.place.tied for entry in board.measured):
        return ""
    sure = f"{board.confidence * 100:g} % for all pairs together (Holm)"
    return f"A range of places means a tie: differences paired by document, {sure}"


def counted_how(board: Leaderboard) -> list[tuple[str, list[str]]]:
    """(what was counted, whose) for the sizes, in the table's order."""
    found: dict[str, list[str]] = {}
    for entry in board.entries:
        if entry.size is not None:
            found.setdefault(entry.size.counted, []).append(entry.name)
    return list(found.items())


def exactness(board: Leaderboard) -> str:
    """How well KL is known, in one word where it is one for all."""
    found = {entry.kl.exactness for entry in board.measured if entry.kl is not None}
    return found.pop() if len(found) == 1 else "exact where not marked >="
