"""One row of a table (JSON lines, CSV, Parquet, data set) as a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evalgate.core import Document, Skipped
from evalgate.corpora.chats import Unreadable, read_chat, read_tools
from evalgate.errors import InputError

TEXT, MESSAGES = "text", "messages"
SHAREGPT, TOOLS = "conversations", "tools"


def needed_columns(columns: Sequence[str], text_column: str | None, place: str) -> list[str]:
    """The columns of `columns` that a document is made of; a column of text or messages is among them.

    Raises InputError, listing the columns of `place`, when the text column is not there.
    """
    sources = (text_column,) if text_column else (TEXT, MESSAGES, SHAREGPT)
    found = [c for c in sources if c in columns]
    if not found:
        listed = ", ".join(columns) or "none"
        raise InputError(
            f"{place} has no column {text_column or TEXT!r} (columns: {listed}); name one with --text-column.",
            file=place,
            columns=list(columns),
        )
    extra = ("domain", "id", "name") if text_column else ("domain", "id", "name", TOOLS)
    return found + [c for c in extra if c in columns and c not in found]


def row_document(row: Mapping[str, object], *, place: str, domain: str, text_column: str | None) -> Document | Skipped:
    """The document in a row: its `text` (or `text_column`), else its chat; null counts as absent.

    A chat is `messages` with `role` and `content`, and the row's `tools` with them, or ShareGPT's `conversations` with
    `from` and `value`. `id`, else `name`, names the document, else `place` (file and row). The row's `domain` wins over
    `domain`. With an explicit `text_column` no chat is looked for. A row that cannot be used is skipped and named.
    """
    column = text_column or TEXT
    fields = {k: v for k, v in row.items() if v is not None}
    name = next((str(fields[k]) for k in ("id", "name") if k != column and _names(fields.get(k))), place)
    own_domain = fields.get("domain", domain) if column != "domain" else domain
    if not isinstance(own_domain, str):
        return Skipped(place, f"domain is {_kind(own_domain)}, not a string")
    own_domain = own_domain or domain
    text = fields.get(column)
    chats = [key for key in (MESSAGES, SHAREGPT) if fields.get(key) is not None] if text_column is None else []
    if len(chats) + (text is not None) > 1:
        return Skipped(place, f"both {' and '.join([*([column] if text is not None else []), *chats])}")
    if chats:
        try:
            turns, tools = read_chat(fields[chats[0]], chats[0]), read_tools(fields.get(TOOLS))
        except Unreadable as problem:
            return Skipped(place, str(problem))
        return Document(name, own_domain, messages=turns, tools=tools)
    if text is None:
        return Skipped(place, f"no {column!r}" if text_column else "neither text nor messages")
    if not isinstance(text, str):
        return Skipped(place, f"{column} is {_kind(text)}, not a string")
    return Document(name, own_domain, text=text)


def _names(value: object) -> bool:
    return (isinstance(value, str) and bool(value)) or (isinstance(value, int) and not isinstance(value, bool))


def _kind(value: object) -> str:
    return type(value).__name__
