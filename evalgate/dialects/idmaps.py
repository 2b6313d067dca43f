"""`{"<id>": {logprob, rank}}` rows of prompt logprobs, as vLLM and TensorRT-LLM send them."""

from __future__ import annotations

from typing import Any, NamedTuple

from evalgate.dialects import listings
from evalgate.dialects.base import Asking, Place
from evalgate.dialects.findings import Findings, complete
from evalgate.dialects.listings import Listing
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


def rows_come(found: Findings) -> Asking[bool]:
    """Whether `prompt_logprobs` is honoured. Asked once for all dialects; fills the facts off_by_one and entries."""
    facts, ids = found.facts, found.question.ids
    if "prompt_logprobs" in facts:
        return bool(facts["prompt_logprobs"])
    facts |= {"prompt_logprobs": False, "off_by_one": False, "entries": "unknown"}
    choices = yield from complete(found, prompt_logprobs=2)
    maps = choices[0].get("prompt_logprobs") if choices else None
    if not isinstance(maps, list) or len(maps) not in (len(ids), len(ids) - 1):
        return False
    rows = [row if isinstance(row, dict) else {} for row in maps]
    straight = sum(str(t) in row for row, t in zip(rows[1:], ids[1:], strict=False))
    shifted = sum(str(t) in row for row, t in zip(rows, ids[1:], strict=False))
    widths = {len(row) for row in rows if row}
    facts |= {
        "prompt_logprobs": True,
        "off_by_one": bool(rows[0]) and shifted >= straight,
        "entries": "k+1" if 3 in widths else "k" if widths == {2} else "unknown",
        "ids_on_wire": True,
    }
    found.listings += [listings.of_id_map(row)[1:] for row in rows]  # the first is the actual token
    return True


def last_row(found: Findings, k: int) -> Asking[Listing]:
    """The last row of the probe's prompt, k alternatives asked for; empty where that is refused."""
    choices = yield from complete(found, prompt_logprobs=k)
    maps = (choices[0].get("prompt_logprobs") if choices else None) or [None]
    return listings.of_id_map(maps[-1] or maps[0])
