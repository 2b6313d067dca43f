"""One row of a table (JSON lines, CSV, Parquet, data set) as a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evalgate.core import Document, Message, Skipped
from evalgate.errors import InputError

TEXT, MESSAGES = "text", "messages"
ROLES = ("system", "user", "assistant", "tool")
TOOL_FIELDS = ("tool_calls", "function_call")  # a turn with these says more than its content


def needed_columns(columns: Sequence[str], text_column: str | None, place: str) -> list[str]:
    """The columns of `columns` that a document is made of; a column of text or messages is among them.

    Raises InputError, listing the columns of `place`, when the text column is not there.
    """
    sources = (text_column,) if text_column else (TEXT, MESSAGES)
    found = [c for c in sources if c in columns]
    if not found:
        listed = ", ".join(columns) or "none"
        raise InputError(
            f"{place} has no column {text_column or TEXT!r} (columns: {listed}); name one with --text-column.",
            file=place,
            columns=list(columns),
        )
    return found + [c for c in ("domain", "id", "name") if c in columns and c not in found]


def row_document(row: Mapping[str, object], *, place: str, domain: str, text_column: str | None) -> Document | Skipped:
    """The document in a row: its `text` (or `text_column`), else its `messages`; null counts as absent.

    `id`, else `name`, names the document, else `place` (file and row). `domain` in the row overrides `domain`. With an
    explicit `text_column` the field `messages` is not looked at. A row that cannot be used is skipped, with the reason.
    """
    column = text_column or TEXT
    fields = {k: v for k, v in row.items() if v is not None}
    name = next((str(fields[k]) for k in ("id", "name") if k != column and _names(fields.get(k))), place)
    own_domain = fields.get("domain", domain) if column != "domain" else domain
    if not isinstance(own_domain, str):
        return Skipped(place, f"domain is {_kind(own_domain)}, not a string")
    own_domain = own_domain or domain
    text = fields.get(column)
    messages = fields.get(MESSAGES) if text_column is None else None
    if text is not None and messages is not None:
        return Skipped(place, "both text and messages")
    if messages is not None:
        turns = _messages(messages)
        return Skipped(place, turns) if isinstance(turns, str) else Document(name, own_domain, messages=turns)
    if text is None:
        return Skipped(place, f"no {column!r}" if text_column else "neither text nor messages")
    if not isinstance(text, str):
        return Skipped(place, f"{column} is {_kind(text)}, not a string")
    return Document(name, own_domain, text=text)


def _names(value: object) -> bool:
    return (isinstance(value, str) and bool(value)) or (isinstance(value, int) and not isinstance(value, bool))


def _kind(value: object) -> str:
    return type(value).__name__


def _messages(value: object) -> tuple[Message, ...] | str:
    """The turns of a chat, or the reason why they cannot be used."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return f"messages is {_kind(value)}, not a list"
    if not value:
        return "messages is empty"
    turns: list[Message] = []
    for number, turn in enumerate(value, 1):
        parsed = _message(turn)
        if isinstance(parsed, str):
            return f"message {number}: {parsed}"
        turns.append(parsed)
    return tuple(turns)


def _message(turn: object) -> Message | str:
    if not isinstance(turn, Mapping):
        return f"{_kind(turn)}, not an object"
    role, content = turn.get("role"), turn.get("content")
    if role not in ROLES:
        return f"role {role!r} is not one of {', '.join(ROLES)}"
    if not isinstance(content, str):
        return f"content is {_kind(content)}, not a string"
    for field in TOOL_FIELDS:
        if turn.get(field):
            return f"{field} is not supported"
    return Message(role=str(role), content=content)
