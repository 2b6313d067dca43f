"""A text's natural documents: the articles of a wikitext file, or what the user says divides it.

Intervals come from differences between documents, so a long text that holds many is cut at them first. Rows of a
data set that are paragraphs of one article are joined to it for the same reason: they are not independent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice, pairwise

from evalgate.core import Document, Skipped
from evalgate.errors import UsageError

# A wikitext title, ` = Valkyria Chronicles III = `; sections have more signs: ` = = Gameplay = = `.
TITLE = re.compile(r"^ = (?!= )[^\n]*(?<! =) = ?\r?$", re.MULTILINE)
LOOK_AHEAD = 64  # rows in which a data set of wikitext shows a title
Splitter = Callable[[Document], list[Document]]


def splitter(split_on: str | None) -> Splitter:
    """What cuts a text into its documents: None = at wikitext titles, "none" = not at all, else where a line matches.

    Raises UsageError for what is not a regular expression, and for one that matches the empty text.
    """
    if split_on is None:
        return lambda text: parted(text, TITLE, least=2)
    if split_on == "none":
        return lambda text: [text]
    try:
        begins = re.compile(split_on, re.MULTILINE)
    except re.error as error:
        raise UsageError(f"--split-on {split_on!r} is not a regular expression: {error}.") from error
    if begins.search("") is not None:
        raise UsageError(f"--split-on {split_on!r} matches an empty line; name the text that a document begins with.")
    return lambda text: parted(text, begins, least=1)


def parted(text: Document, begins: re.Pattern[str], *, least: int) -> list[Document]:
    """The documents of a text, each from the line in which one begins to the next; joined they are the text again.

    Parts are named NAME:K, from 1, and know which text they are of. A text with fewer than `least` beginnings, or with
    one at its start alone, is returned whole.
    """
    lines = sorted({text.text.rfind("\n", 0, match.start()) + 1 for match in begins.finditer(text.text)})
    if len(lines) < least:
        return [text]
    if not text.text[: lines[0]].strip():
        lines[0] = 0  # blank lines before the first document belong to it
    cuts = [*([0] if lines[0] else []), *lines, len(text.text)]
    if len(cuts) < 3:
        return [text]
    return [
        replace(text, name=f"{text.name}:{number}", text=text.text[start:stop], whole=text.name)
        for number, (start, stop) in enumerate(pairwise(cuts), 1)
    ]


def joined_rows(items: Iterable[Document | Skipped]) -> Iterator[Document | Skipped]:
    """Rows of wikitext, one a paragraph, as articles named by their title's row; rows of any other kind as they are."""
    rows = iter(items)
    first = list(islice(rows, LOOK_AHEAD))
    if not any(_is_title(item) for item in first):
        yield from chain(first, rows)
        return
    article: Document | None = None
    for item in chain(first, rows):
        if isinstance(item, Skipped) or item.messages:
            yield item
        elif article is None or _is_title(item):
            if article is not None:
                yield article
            article = item
        else:
            gap = "" if article.text.endswith("\n") or not article.text else "\n"
            article = replace(article, text=f"{article.text}{gap}{item.text}")
    if article is not None:
        yield article


def _is_title(item: Document | Skipped) -> bool:
    return isinstance(item, Document) and TITLE.fullmatch(item.text.rstrip("\n")) is not None
