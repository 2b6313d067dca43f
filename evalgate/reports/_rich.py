"""What reports for a terminal are made of: rich's tables and texts, and one way to print them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Literal

from evalgate.printable import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

_UNLIMITED = 100_000  # columns: no line wraps


def printed(parts: Iterable[RenderableType], *, width: int, color: bool) -> str:
    """The parts below each other; escape sequences only with `color`. A text with overflow="ignore" stays whole."""
    buffer = StringIO()
    console = _console(buffer, width, color=color)
    for part in parts:
        console.print(part, crop=getattr(part, "overflow", None) != "ignore")
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()).strip("\n") + "\n"


def columns(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Rows of equal length as aligned lines, the columns in `right` flush right; no line wraps."""
    grid = new_table(header=False)
    for i in range(len(rows[0])):
        grid.add_column(justify="right" if i in right else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*map(safe, row))
    return printed([grid], width=_UNLIMITED, color=False)


def new_table(*, header: bool) -> Table:
    """A table without lines, two spaces between its columns."""
    from rich.table import Table

    return Table(box=None, show_header=header, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")


def fact_table(pairs: Sequence[tuple[str, str]]) -> Table:
    """Names and what is said of them; the texts wrap in their column."""
    grid = new_table(header=False)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, said in pairs:
        grid.add_row(safe(name), safe(said))
    return grid


def title(words: str | Text) -> Text:
    """A heading with an empty line above it."""
    from rich.text import Text

    return Text.assemble("\n====== ", safe(words) if isinstance(words, str) else words, " ======", style="bold")


def safe(content: str, style: str = "") -> Text:
    """Text that can neither steer the terminal nor begin a line of its own: what names hold is escaped."""
    from rich.text import Text

    return Text(printable(content), style=style)


def fitted(text: str, columns: int, *, keep: Literal["start", "end"] = "end") -> str:
    """The text, its start or end cut off for `...` where it is wider than so many columns."""
    from rich.cells import cell_len

    if cell_len(text) <= columns:
        return text
    kept = text[:columns] if keep == "start" else text[-columns:]
    while kept and cell_len(kept) > columns - 3:
        kept = kept[:-1] if keep == "start" else kept[1:]
    return f"{kept}..." if keep == "start" else f"...{kept}"


def folded(text: Text, width: int) -> list[Text]:
    """The lines of a text that is wrapped at so many columns."""
    return list(text.wrap(_console(StringIO(), width, color=False), width, overflow="fold"))


def block(content: str) -> Text:
    """Lines whose names were made safe before."""
    from rich.text import Text

    return Text(printable(content, lines=True))


def _console(buffer: StringIO, width: int, *, color: bool) -> Console:
    from rich.console import Console

    return Console(
        file=buffer,
        width=width,
        force_terminal=color,
        no_color=not color,
        color_system="standard" if color else None,
        force_jupyter=False,
        legacy_windows=False,
        markup=False,
        emoji=False,
        highlight=False,
    )
