"""The leaderboard as one offline page: the plot of KL against size, a table that sorts, and how it was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import TYPE_CHECKING
from urllib.parse import quote

from evalgate.printable import printable
from evalgate.reports import Report
from evalgate.reports._board_page import page
from evalgate.reports._leaderboard import (
    HEADINGS,
    SPEED,
    bits_text,
    bytes_text,
    counted_how,
    exactness,
    listed,
    measured,
    place_text,
    quantity_text,
    sentence,
    speed_text,
    ties,
)
from evalgate.reports._pareto import DARK, LIGHT, STYLE, plot

if TYPE_CHECKING:
    from evalgate.leaderboard import Entry, Leaderboard

_COLUMNS = (
    ("place", "place", True),
    ("candidate", "candidate", False),
    ("kl", f"{HEADINGS['kl']} (nats)", True),
    ("top1", HEADINGS["top1"], True),
    ("ratio", HEADINGS["ratio"], True),
    ("size", "size", True),
    ("bits", "bits per weight", True),
    ("speed", "tokens/s", True),
)


def render(board: Leaderboard, *, links: Mapping[str, str] | None = None) -> str:
    """The page. links: by name, the page of a candidate's own run, relative to this one."""
    reference = _safe(board.reference.spec)
    body = "\n".join(_body(board, links or {}))
    return page(f"Sweep against {board.reference.spec}", f"Sweep against <code>{reference}</code>", body, style=STYLE)


def fragment(board: Leaderboard) -> str:
    """The plot and the table for a notebook, in the notebook's own theme as far as it says one, without scripts."""
    style = f".plot {{ {LIGHT} }} @media (prefers-color-scheme: dark) {{ .plot {{ {DARK} }} }} {STYLE}"
    heads = "".join(f'<th scope="col">{escape(heading)}</th>' for _, heading, _ in _COLUMNS)
    said = sentence(board)
    drawn = plot(board)
    return "\n".join(
        [
            f"<div><p><strong>evalgate sweep against {_safe(board.reference.spec)}</strong>: {_safe(said)}.</p>",
            f"<style>{style}</style>{drawn}" if drawn else "",
            f"<table><thead><tr>{heads}</tr></thead><tbody>",
            *(_row(entry, board, {}) for entry in board.measured),
            "</tbody></table>",
            *(f"<p>{_safe(entry.name)}: {_safe(entry.reason)}</p>" for entry in board.entries if not entry.measured),
            f"<p><small>{_safe(ties(board))}</small></p>" if ties(board) else "",
            "</div>",
        ]
    )


def _body(board: Leaderboard, links: Mapping[str, str]) -> Iterator[str]:
    said = sentence(board)
    yield f'<p class="lead">{_safe(said[:1].upper() + said[1:])}.</p>'
    drawn = plot(board)
    if drawn:
        yield f'<figure><div class="wide" tabindex="0" role="region" aria-label="Plot">{drawn}</div>'
        yield "<figcaption>Lower is closer to the reference, further left is smaller. The dashed "
        yield "line is the front: no candidate is both smaller and closer than one on it.</figcaption></figure>"
    yield '<h2 id="board">Leaderboard</h2>'
    yield '<div class="wide" tabindex="0" role="region" aria-labelledby="board">'
    yield '<table class="sortable"><thead><tr>'
    for key, heading, number in _COLUMNS:
        sorting = ' aria-sort="ascending"' if key == "kl" else ""
        kind = ' class="number"' if number else ""
        yield f'<th scope="col"{kind}{sorting}><button type="button">{escape(heading)}</button></th>'
    yield "</tr></thead><tbody>"
    yield from (_row(entry, board, links) for entry in board.measured)
    yield "</tbody></table></div>"
    if ties(board):
        yield f"<p>{_safe(ties(board))}.</p>"
    failed = [entry for entry in board.entries if not entry.measured]
    if failed:
        yield "<h2>Not measured</h2><dl>"
        yield from (f"<dt>{_safe(entry.name)}</dt><dd>{_safe(entry.reason)}</dd>" for entry in failed)
        yield "</dl>"
    yield "<h2>How it was measured</h2><ul>"
    yield from (f"<li>{_safe(one)}</li>" for one in _how(board))
    yield "</ul>"
    if board.notes:
        yield "<h2>Notes</h2><ul>"
        yield from (f"<li>{_safe(note)}</li>" for note in board.notes)
        yield "</ul>"


def _row(entry: Entry, board: Leaderboard, links: Mapping[str, str]) -> str:
    texts = {name: quantity_text(entry, name, board) for name in ("kl", "top1", "ratio")}
    name = _safe(entry.name)
    if entry.name in links:
        name = f'<a href="{escape(quote(links[entry.name]))}">{name}</a>'
    front = ' <span class="mark" title="no candidate is both smaller and closer">front</span>' if entry.front else ""
    spec = f"<small><code>{_safe(entry.spec)}</code></small>" if entry.spec != entry.name else ""
    keys: list[tuple[str, float | None, str]] = [
        (
            "number",
            None if entry.place is None else entry.place.best + entry.place.worst / 1e4,
            escape(place_text(entry)),
        ),
        *(
            ("number", _key(entry, q), f"{escape(texts[q].value)}<small>{escape(texts[q].interval)}</small>")
            for q in ("kl", "top1", "ratio")
        ),
        ("number", None if entry.size is None else entry.size.bytes, escape(bytes_text(entry.size))),
        ("number", None if entry.size is None else entry.size.bits, escape(bits_text(entry.size))),
        ("number", entry.speed, escape(speed_text(entry))),
    ]
    cells = [
        f'<td class="{kind}" data-v="{"" if key is None else repr(key)}">{shown}</td>' for kind, key, shown in keys
    ]
    head = f'<th scope="row" data-v="{_safe(entry.name)}">{name}{front}{spec}</th>'
    return f"<tr>{cells[0]}{head}{''.join(cells[1:])}</tr>"


def _key(entry: Entry, name: str) -> float | None:
    quantity = getattr(entry, name)
    least = None if quantity is None else quantity.least
    return None if least is None else float(least.value)


def _how(board: Leaderboard) -> Iterator[str]:
    yield f"evalgate {board.evalgate_version}, {board.created}, KL {exactness(board)}, {board.seconds:,.0f} seconds"
    yield measured(board)
    yield f"intervals are {board.confidence:.0%}, over documents"
    for how, names in counted_how(board):
        yield f"size of {listed(names, most=20)}: {how}"
    if any(entry.speed is not None for entry in board.entries):
        yield SPEED[:1].lower() + SPEED[1:]
    yield f"versions: {', '.join(f'{name} {version}' for name, version in sorted(board.versions.items()))}"


def _safe(text: str) -> str:
    return escape(printable(text))


REPORT = Report("sweep", render)
