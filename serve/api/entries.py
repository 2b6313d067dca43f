"""Scores as the wire writes them: vLLM's prompt entries, OpenAI's legacy lists and chat entries.

A logprob of -inf, or of a mask, is written as -9999.0, because JSON has no infinities.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from serve.engine.sequence import RowScores
from serve.models.tokenizer import token_bytes
from serve.wire import LEAST_LOGPROB

CENSORED = -9999.0


def number(logprob: float) -> float:
    """A logprob as a JSON number."""
    return CENSORED if logprob <= LEAST_LOGPROB else logprob


_known: WeakKeyDictionary[Any, dict[int, bytes]] = WeakKeyDictionary()


class Names:
    """How one reply writes tokens: as text, or as `token_id:N`."""

    def __init__(self, tokenizer: Any, *, as_ids: bool = False) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids
        self._bytes = _known.setdefault(tokenizer, {})

    def bytes(self, token: int) -> bytes:
        """The token's own bytes, perhaps a piece of a character."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = token_bytes(self._tokenizer, token)
        return found

    def text(self, token: int) -> str:
        """The token's text; a piece of a character reads as U+FFFD."""
        return self.bytes(token).decode("utf-8", "replace")

    def __call__(self, token: int) -> str:
        """The token as this reply writes it."""
        return f"token_id:{token}" if self._as_ids else self.text(token)


class Place(NamedTuple):
    """A token of the legacy lists: its scores (None: not scored, the first of a prompt) and its first character."""

    token: int
    row: RowScores | None
    offset: int


def cut(row: RowScores, k: int) -> RowScores:
    """The row with its top list cut to k (-1 = not cut)."""
    return row if k == -1 else row._replace(top_ids=row.top_ids[:k], top_logprobs=row.top_logprobs[:k])


def prompt_entries(names: Names, rows: Iterable[RowScores], k: int) -> list[dict[str, Any] | None]:
    """One entry per prompt token, null for the first: the actual token first, then the top k, then named ids."""
    return [None, *(_prompt_entry(names, cut(row, k)) for row in rows)]


def _prompt_entry(names: Names, row: RowScores) -> dict[str, Any]:
    def item(token: int, logprob: float, rank: int) -> dict[str, Any]:
        own = names.bytes(token)
        text = own.decode("utf-8", "replace")
        return {"logprob": number(logprob), "rank": rank, "decoded_token": text, "bytes": list(own)}

    entry = {str(row.token): item(row.token, row.logprob, row.rank)}
    for rank, (token, logprob) in enumerate(zip(row.top_ids, row.top_logprobs, strict=True), start=1):
        entry.setdefault(str(token), item(token, logprob, rank))
    for wanted in row.wanted:
        entry.setdefault(str(wanted.token), item(*wanted))
    return entry


def legacy(names: Names, places: Sequence[Place], k: int) -> dict[str, Any]:
    """OpenAI's completion logprobs, and beside them ids, bytes and ranks (which texts cannot tell).

    Each dict has the actual token first. Tokens of one dict that read alike share a key, which has the
    likeliest one's value, so that max() over a dict is always the largest logprob.
    """
    tops: list[dict[str, float] | None] = []
    for place in places:
        tops.append(None if place.row is None else _by_name(names, cut(place.row, k)))
    return {
        "tokens": [names(place.token) for place in places],
        "token_logprobs": [None if p.row is None else number(p.row.logprob) for p in places],
        "top_logprobs": tops,
        "text_offset": [place.offset for place in places],
        "token_ids": [place.token for place in places],
        "bytes": [list(names.bytes(place.token)) for place in places],
        "ranks": [None if p.row is None else p.row.rank for p in places],
    }


def _by_name(names: Names, row: RowScores) -> dict[str, float]:
    named = ((w.token, w.logprob) for w in row.wanted)
    top: dict[str, float] = {}
    for token, logprob in ((row.token, row.logprob), *zip(row.top_ids, row.top_logprobs, strict=True), *named):
        key, value = names(token), number(logprob)
        top[key] = max(value, top.get(key, value))
    return top


def chat_entry(names: Names, row: RowScores, k: int) -> dict[str, Any]:
    """OpenAI's chat entry with id and rank: the token, and exactly its top k in order, then named ids."""

    def item(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {
            "token": names(token),
            "logprob": number(logprob),
            "bytes": list(names.bytes(token)),
            "id": token,
            "rank": rank,
        }

    row = cut(row, k)
    tops = [item(t, lp, i) for i, (t, lp) in enumerate(zip(row.top_ids, row.top_logprobs, strict=True), start=1)]
    listed = set(row.top_ids)
    tops += [item(*w) for w in row.wanted if w.token not in listed]
    return {**item(row.token, row.logprob, row.rank), "top_logprobs": tops}
