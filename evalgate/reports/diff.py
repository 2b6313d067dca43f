"""The worst tokens in their text: what came before, what both sides would rather have said, how far apart they are.

Text whose direction or width a terminal decides stands at the end of its line, so that nothing beside it moves. What
cannot be seen is written as a sign: a new line as the arrow of the return key, a tab as an arrow, and spaces as dots,
but for a single one in the text before.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from evalgate.core import counted
from evalgate.printable import printable
from evalgate.reports import Report
from evalgate.reports._numbers import PERCENT_UNITS, plain
from evalgate.reports._rich import block, fitted, folded, printed, safe
from evalgate.reports._words import METRICS

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from evalgate.stats.worst import Choice, Token, WorstToken, WorstTokens

_SIDES = {"ref": "reference", "cand": "candidate"}
_MARK = ("\u00bb", "\u00ab")  # around the token
_GAP, _DOT = "...", "\u00b7"
_SPACES = re.compile(" {2,}| $")
_LONGEST = 48  # columns of one token's text
_INDENT = 4
_SEEN = str.maketrans({"\n": "\u21b5", "\r": "\u240d", "\t": "\u2192", "\u00a0": "\u237d"})


def render(document: WorstTokens, *, width: int = 80, color: bool = False) -> str:
    """Some lines per token, none wider than `width` columns; escape sequences only with `color`."""
    return printed(_parts(document, width), width=width, color=color)


def _parts(document: WorstTokens, width: int) -> Iterator[RenderableType]:
    yield safe(_title(document), "bold")
    if not document.texts_known:
        yield safe("This run does not know the texts of its tokens: they are shown as ids.")
    for number, token in enumerate(document.tokens, 1):
        yield block("")
        yield from _token(document, token, number, width)


def _title(document: WorstTokens) -> str:
    against = "" if document.reference is None else f" against {fitted(printable(document.reference), 40)}"
    where = "" if document.domain is None else f" of domain {fitted(printable(document.domain), 40)}"
    name = METRICS.get(document.metric, document.metric)
    bound = ", by its lower bound" if document.series == "low" else ""
    number = f"{len(document.tokens):,} " if len(document.tokens) > 1 else ""
    chosen = f"the {number}worst of {counted(document.positions, 'position')}{where}"
    unit = "" if document.unit in PERCENT_UNITS else f" ({document.unit})"
    return f"{fitted(printable(document.candidate), 40)}{against}: {chosen} by {name}{unit}{bound}"


def _token(document: WorstTokens, token: WorstToken, number: int, width: int) -> Iterator[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    figures = [f"{METRICS.get(document.metric, document.metric)} {_figure(document, token)}"]
    if document.metric != "kl" and token.kl is not None:
        figures.append(f"KLD {'>= ' if token.kl_bounded else ''}{plain(token.kl, 3)}")
    place = f"window {token.window}, position {token.position}, {token.domain}: {token.document}"
    head = f"{number}. {', '.join(figures)}  "
    yield Text.assemble(safe(head, "bold"), safe(fitted(printable(place), max(width - len(head), 20), keep="start")))
    yield Padding(_context(token, width - _INDENT), (0, 0, 0, _INDENT))
    for line in _choices(token, width - _INDENT, alone=document.reference is None):
        yield Padding(line, (0, 0, 0, _INDENT))


def _figure(document: WorstTokens, token: WorstToken) -> str:
    scale, sign = (100.0, "%") if document.unit in PERCENT_UNITS else (1.0, "")
    return f"{'>= ' * (document.series == 'low')}{plain(token.value * scale, 3)}{sign}"


def _context(token: WorstToken, width: int) -> Text:
    """The text before the token, and the token between marks, which stays on one line where it can."""
    from rich.text import Text

    # The first token of a window is never scored, so that something always comes before.
    before = "".join(_GAP if one is None else _text(one) for one in [None, *token.before])
    before = _SPACES.sub(lambda spaces: _DOT * len(spaces[0]), before)
    left, right = _MARK
    marked = safe(f"{left}{_dotted(token.token)}{right}", "bold reverse")
    lines = folded(safe(before, "dim"), width)
    if lines[-1].cell_len + marked.cell_len > width:
        lines.append(Text())
    lines[-1] = Text.assemble(lines[-1], marked)
    return Text("\n").join(lines)


def _choices(token: WorstToken, width: int, *, alone: bool) -> Iterator[RenderableType]:
    """A line per side with its likeliest tokens; a line for each of them where one is written from right to left."""
    if token.probability:
        shares = [_percent(p) if alone else f"{_SIDES[side]} {_percent(p)}" for side, p in token.probability.items()]
        yield safe(f"this token: {', '.join(shares)}")
    apart = any(_right_to_left(choice.token) for choices in token.choices.values() for choice in choices)
    for side, choices in token.choices.items():
        name = "picks" if alone else f"{_SIDES[side]} picks"
        if not apart:
            yield safe(_fitting([_choice(choice) for choice in choices], f"{name.ljust(15)}  ", width))
            continue
        for choice in choices:
            # The text comes last: it may run the other way.
            share = "" if choice.probability is None else f"{_percent(choice.probability)}  "
            yield safe(f"{name.ljust(15)}  {share}{_dotted(choice.token)}")
            name = ""


def _choice(choice: Choice) -> str:
    share = "" if choice.probability is None else f" {_percent(choice.probability)}"
    return f"{_dotted(choice.token)}{share}"


def _fitting(parts: Sequence[str], lead: str, width: int) -> str:
    """As many parts as fit in one line, the first in any case."""
    from rich.cells import cell_len

    line = lead + parts[0]
    for part in parts[1:]:
        if cell_len(line) + 3 + cell_len(part) > width:
            break
        line += f"   {part}"
    return line


def _percent(probability: float) -> str:
    return f"{plain(100 * probability, 3)}%"


def _text(token: Token) -> str:
    """A token's text with what cannot be seen as a sign."""
    if not token.text:
        return f"<id {token.id}>" if token.text is None else f"<empty {token.id}>"
    # Only at the start of a line are two colons a command: what comes before a token here is on its line.
    shown = printable(f".{token.text.translate(_SEEN)}").removeprefix(".")
    return fitted(shown, _LONGEST, keep="start")


def _dotted(token: Token) -> str:
    """The same with spaces as dots."""
    return _text(token).replace(" ", _DOT) if token.text else _text(token)


def _right_to_left(token: Token) -> bool:
    return any(unicodedata.bidirectional(c) in ("R", "AL", "AN") for c in token.text or "")


REPORT = Report("diff", render, terminal=True)
