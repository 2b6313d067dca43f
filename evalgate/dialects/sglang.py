"""SGLang's native /generate: input logprobs with ids, and given ids scored at every position.

`meta_info.input_token_logprobs` = [[null, id, text], [logprob, id, text], ...] from token
`logprob_start_len` on, `input_top_logprobs` and `input_token_ids_logprobs` likewise with one list each.
Input logprobs are raw; output logprobs, which are not used here, are scaled by the temperature.
"""

from __future__ import annotations

from typing import Any

from evalgate.core import Window
from evalgate.dialects import listings
from evalgate.dialects.base import Ask, Asking, Capabilities, Dialect, Exchange, Place, PositionScore, Request
from evalgate.dialects.body import check_prompt, read_body
from evalgate.dialects.findings import Findings, ask
from evalgate.dialects.generation import COMPLETIONS
from evalgate.dialects.listings import Listing
from evalgate.dialects.rows import Entry, as_id, as_logprob, score_position, window_scores
from evalgate.errors import EndpointError, ScoreError

PATH = "/generate"


def _per_token(meta: dict[str, Any], name: str, count: int, place: Place) -> list[Any]:
    """One list per token of [start, n)."""
    values = meta.get(name)
    if not isinstance(values, list) or len(values) != count:
        got = len(values) if isinstance(values, list) else "none"
        raise place.error(ScoreError, f"meta_info.{name} should have {count} entries and has {got}")
    return values


def _check_ids(own: list[Any], ids: tuple[int, ...], start: int, place: Place) -> None:
    for index, item in enumerate(own):
        here = place.at(start + index)
        if not isinstance(item, list) or len(item) < 2:
            raise here.error(ScoreError, f"{item!r} stands where [logprob, id, text] should be")
        if as_id(item[1], here) != ids[start + index]:
            raise here.error(
                ScoreError,
                f"the server scored token {item[1]} and the window holds {ids[start + index]}: shifted or cut",
            )
    if own[0][0] is not None:
        raise place.at(start).error(ScoreError, "the first entry should have no logprob: positions are off by one")


def _row(token: int, own: list[Any], top: Any, extra: Any, ask: Ask, place: Place) -> PositionScore:
    entries = [_entry(own, place, beside=True)]
    if ask.k and not isinstance(top, list):
        raise place.error(ScoreError, "the alternatives are missing (input_top_logprobs)")
    entries += [_entry(item, place) for item in top or ()]
    wanted = set(ask.wanted.get(place.position if place.position is not None else -1, ()))
    if wanted and not isinstance(extra, list):
        raise place.error(ScoreError, "the ids asked for are missing (input_token_ids_logprobs)")
    entries += [e for item in extra or () if (e := _entry(item, place, beside=True)).ids & wanted]
    return score_position(token, entries, ask, place)


def _entry(item: Any, place: Place, *, beside: bool = False) -> Entry:
    if not isinstance(item, list) or len(item) < 2:
        raise place.error(ScoreError, f"{item!r} stands where [logprob, id, text] should be")
    return Entry(frozenset({as_id(item[1], place)}), as_logprob(item[0], place), beside)


def _probed(found: Findings, k: int) -> Asking[list[Any]]:
    """Alternatives of each token of the probe's prompt; empty unless every token was scored."""
    ids, sampling = list(found.question.ids), {"max_new_tokens": 1, "temperature": 1.0}
    fields = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    body = yield from ask(found, PATH, fields | {"top_logprobs_num": k}, k=k)
    meta = (body or {}).get("meta_info")
    own, top = (meta.get(f"input_{name}_logprobs") if isinstance(meta, dict) else None for name in ("token", "top"))
    whole = isinstance(own, list) and isinstance(top, list) and len(own) == len(top) == len(ids)
    return list(top) if whole and isinstance(top, list) else []


class SGLang(Dialect):
    """SGLang's native path; see the top of this file."""

    summary = "SGLang's /generate with return_logprob: one request per window, given ids at every position"
    order = 30
    prompt_scoring = True
    shared_ids = True
    generation = COMPLETIONS
    draws = False

    def score_window(self, window: Window, ask: Ask) -> Exchange:
        """Score a window with one request."""
        positions = ask.positions_in(window)
        place = Place(PATH, window.index)
        start = positions[0] - 1  # the entry of token `start` is null, the one after it is the first position
        wanted = sorted({w for i in positions for w in ask.wanted.get(i, ())})
        fields: dict[str, Any] = {
            "input_ids": list(window.ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start,
            "top_logprobs_num": ask.k,
            "return_text_in_logprobs": False,
        }
        if wanted:
            fields["token_ids_logprob"] = wanted
        (reply,) = yield (Request("POST", PATH, fields),)
        meta = read_body(reply, place, k=ask.k).get("meta_info")
        if not isinstance(meta, dict) or not isinstance(meta.get("input_token_logprobs"), list):
            raise place.error(EndpointError, "the reply has no meta_info.input_token_logprobs: is this SGLang?")
        check_prompt({}, {}, window.ids, place, count=meta.get("prompt_tokens"))
        own = _per_token(meta, "input_token_logprobs", len(window.ids) - start, place)
        top = _per_token(meta, "input_top_logprobs", len(own), place) if ask.k else [None] * len(own)
        extra = _per_token(meta, "input_token_ids_logprobs", len(own), place) if wanted else [None] * len(own)
        _check_ids(own, window.ids, start, place)
        rows = [
            _row(window.ids[i], own[i - start], top[i - start], extra[i - start], ask, place.at(i)) for i in positions
        ]
        return window_scores(window, ask, rows, text_keyed=False)

    def recognised(self, found: Findings) -> Asking[bool]:
        """/generate scores every token of the prompt."""
        rows = yield from _probed(found, 2)
        honoured = len(rows) == len(found.question.ids)
        if honoured:
            found.listings += [listings.of_triples(row) for row in rows]
            found.facts["ids_on_wire"] = True
        return honoured

    def listing(self, found: Findings, k: int) -> Asking[Listing]:
        """The last token's alternatives."""
        rows = yield from _probed(found, k)
        return listings.of_triples(rows[-1]) if rows else []

    def names_ids(self, able: Capabilities) -> bool:
        """`token_ids_logprob`, one list for all positions."""
        return True


DIALECT = SGLang()
