"""The corpus: usable documents with unique names, what was skipped and why, and one hash over all of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from evalgate.core import Document, Skipped
from evalgate.errors import InputError

NAMED_REASONS = 5  # how many skipped documents an error spells out


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order, with unique names.

    `skipped` names every document, row or file that was left out. `hash` is `digest(documents)`.
    """

    name: str
    documents: tuple[Document, ...]
    skipped: tuple[Skipped, ...]
    hash: str


def build(name: str, items: Iterable[Document | Skipped], *, min_bytes: int = 1) -> Corpus:
    """Checks every document, makes names unique (`name`, `name#2`, ...) and hashes what is left.

    A document is skipped when its text is empty, only whitespace, binary (NUL byte), not UTF-8 or shorter than
    `min_bytes` UTF-8 bytes; a chat is judged by all its contents together.

    A copy of an earlier document is skipped too, whatever its name and domain: shown again, it is no further evidence.

    Raises InputError when no usable document is left, naming the reasons.
    """
    documents: list[Document] = []
    skipped: list[Skipped] = []
    taken: set[str] = set()
    first: dict[tuple[object, ...], str] = {}  # what is shown -> the first document that shows it
    for item in items:
        if isinstance(item, Skipped):
            skipped.append(item)
            continue
        reason = _problem(item, min_bytes)
        shown = (item.text, item.messages, item.tools)
        if not reason and shown in first:
            reason = f"the same text as {first[shown]}, which counts once"
        if reason:
            skipped.append(Skipped(item.name, reason))
        else:
            documents.append(replace(item, name=_unique(item.name, taken)))
            first[shown] = documents[-1].name
    if not documents:
        raise InputError(
            f"corpus {name!r} has no usable document ({_reasons(skipped)}): give UTF-8 text with --data", corpus=name
        )
    return Corpus(name=name, documents=tuple(documents), skipped=tuple(skipped), hash=digest(documents))


def digest(documents: Iterable[Document]) -> str:
    """xxh3-128 (32 hex digits) over all that a document holds, in order.

    Every string goes in as its length (8 bytes, little-endian) and its UTF-8 bytes, every list of messages with
    its count before it: no two different corpora give the same byte stream.
    """
    from xxhash import xxh3_128

    state = xxh3_128()

    def put(text: str) -> None:
        raw = text.encode()
        state.update(len(raw).to_bytes(8, "little"))
        state.update(raw)

    for document in documents:
        put(document.name)
        put(document.domain)
        put(document.text)
        state.update(len(document.messages).to_bytes(8, "little"))
        for message in document.messages:
            put(message.role)
            put(message.content)
            if message.fields:  # marked, so that it cannot be read as the next message's role
                put("\0fields")
                put(message.fields)
        if document.tools:
            put("\0tools")
            put(document.tools)
        if document.whole:
            put("\0whole")
            put(document.whole)
    return str(state.hexdigest())


def _problem(document: Document, min_bytes: int) -> str | None:
    """Why the document cannot be used, None where it can."""
    text = "".join(m.content + m.fields for m in document.messages) if document.messages else document.text
    if not text:
        return "empty"
    if "\0" in text:
        return "binary (NUL byte)"
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return "not UTF-8"
    if text.isspace():
        return "only whitespace"
    if size < min_bytes:
        return f"shorter than {min_bytes} bytes"
    return None


def _unique(name: str, taken: set[str]) -> str:
    """`name`, or the first of name#2, name#3, ... that is free; marks it as taken."""
    candidate, count = name, 1
    while candidate in taken:
        count += 1
        candidate = f"{name}#{count}"
    taken.add(candidate)
    return candidate


def _reasons(skipped: list[Skipped]) -> str:
    if not skipped:
        return "it holds no document at all"
    named = ", ".join(f"{s.name}: {s.reason}" for s in skipped[:NAMED_REASONS])
    rest = len(skipped) - NAMED_REASONS
    return f"{named}, and {rest} more" if rest > 0 else named
