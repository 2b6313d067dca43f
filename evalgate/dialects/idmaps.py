"""`{"<id>": {logprob, rank}}` rows of prompt logprobs, as vLLM and TensorRT-LLM send them."""

from __future__ import annotations

from typing import Any, NamedTuple

from evalgate.dialects.base import Place
from evalgate.dialects.rows import Entry, as_logprob
from evalgate.errors import EndpointError, ScoreError


class IdMap(NamedTuple):
    """Entries of one row. rank: the server's rank of the window's own token. listed: whether that is there."""

    entries: list[Entry]
    rank: int | None
    listed: bool


def prompt_maps(body: dict[str, Any], choice: dict[str, Any], place: Place) -> list[Any]:
    """The list of rows, per choice or at the top level; EndpointError where the server ignored the request."""
    maps = choice.get("prompt_logprobs")
    if maps is None:
        maps = body.get("prompt_logprobs")
    if not isinstance(maps, list) or not maps:
        raise place.error(
            EndpointError,
            "the reply has no prompt_logprobs, the server ignores that field: use the dialect 'continuation'",
        )
    return maps


def read_map(row: Any, token: int, place: Place) -> IdMap:
    """One row; ScoreError where it is missing or holds anything but ids and logprobs."""
    if not isinstance(row, dict) or not row:
        raise place.error(ScoreError, "the position has no logprobs")
    entries: list[Entry] = []
    rank, listed = None, False
    for key, item in row.items():
        if not key.isascii() or not key.isdigit():
            raise place.error(ScoreError, f"{key!r} stands where a token id should be")
        value = item.get("logprob") if isinstance(item, dict) else item
        entries.append(Entry(frozenset({int(key)}), as_logprob(value, place)))
        if int(key) == token:
            listed = True
            rank = _rank(item.get("rank"), place) if isinstance(item, dict) else None
    return IdMap(entries, rank, listed)


def _rank(value: object, place: Place) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise place.error(ScoreError, f"{value!r} stands where a rank should be")
    return value
