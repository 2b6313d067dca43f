"""The one generated token of a completions or chat reply, in either shape that servers send."""

from __future__ import annotations

from typing import Any, NamedTuple

from evalgate.dialects.base import Ask, Place
from evalgate.dialects.rows import Entry, as_id, as_logprob
from evalgate.dialects.texts import entries_of_map, entry_of_item, ids_of_text
from evalgate.errors import EndpointError, ScoreError


class Generated(NamedTuple):
    """entries[0] is the generated token. text_keyed: some entry came without an id."""

    entries: list[Entry]
    text_keyed: bool


def read_generated(choice: dict[str, Any], ask: Ask, place: Place) -> Generated:
    """Entries of exactly one generated token.

    Shapes: `logprobs.content[0]` (chat, llama-server) and `logprobs.{tokens, token_logprobs,
    top_logprobs}` (completions). Raises EndpointError where there are no logprobs, ScoreError where there
    is not exactly one token.
    """
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        raise place.error(EndpointError, "the reply has no logprobs: this server or model does not return them")
    if isinstance(logprobs.get("content"), list):
        return _chat_shape(logprobs["content"], ask, place)
    return _completions_shape(logprobs, choice.get("token_ids"), ask, place)


def _one(items: object, place: Place) -> Any:
    if not isinstance(items, list) or len(items) != 1:
        count = len(items) if isinstance(items, list) else "no"
        raise place.error(ScoreError, f"{count} generated tokens came with logprobs and exactly 1 was asked for")
    return items[0]


def _chat_shape(content: list[Any], ask: Ask, place: Place) -> Generated:
    item = _one(content, place)
    own = entry_of_item(item, ask, place, beside=True)
    top = item.get("top_logprobs")
    if not isinstance(top, list) or (ask.k and not top):
        raise place.error(ScoreError, "the alternatives are missing (top_logprobs)")
    keyed = any(not _has_id(t) for t in [item, *top])
    return Generated([own, *(entry_of_item(t, ask, place) for t in top)], keyed)


def _has_id(item: Any) -> bool:
    return item.get("id") is not None or str(item.get("token")).startswith("token_id:")


def _completions_shape(logprobs: dict[str, Any], token_ids: object, ask: Ask, place: Place) -> Generated:
    text = _one(logprobs.get("tokens"), place)
    value = as_logprob(_one(logprobs.get("token_logprobs"), place), place)
    ids = ids_of_text(text, ask, place) if token_ids is None else frozenset({as_id(_one(token_ids, place), place)})
    top = logprobs.get("top_logprobs")
    listed: dict[str, Any] = {} if not ask.k and not top else _one(top, place)
    entries = entries_of_map(listed, ask, place)
    if ask.k and not entries:
        raise place.error(ScoreError, "the alternatives are missing (top_logprobs)")
    keyed = any(not str(key).startswith("token_id:") for key in listed)
    return Generated([Entry(ids, value, True, str(text)), *entries], keyed)
