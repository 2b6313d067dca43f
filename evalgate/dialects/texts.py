"""Alternatives that came as texts or bytes -> the ids they may be. Never a guess."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from evalgate.dialects.base import Ask, Place, Vocabulary
from evalgate.dialects.rows import ANY, Entry, as_id, as_logprob
from evalgate.errors import EndpointError, ScoreError

_TOKEN_ID = re.compile(r"token_id:([0-9]+)")
REPLACEMENT = "\ufffd"  # stands for bytes that are not whole characters
_ESCAPE = re.compile(r"\\x([0-9a-fA-F]{2})")


def ids_of_text(text: object, ask: Ask, place: Place) -> frozenset[int]:
    """The ids that a text key may stand for: one, several, or ANY where the text does not say.

    Reads `token_id:N` (vLLM's `return_tokens_as_token_ids`) and OpenAI's `bytes:\\xNN`. A text with the
    replacement character or one that no token has may be any token. Raises ScoreError where it is no
    text, EndpointError where a vocabulary is needed and there is none.
    """
    if not isinstance(text, str):
        raise place.error(ScoreError, f"{text!r} stands where a token's text should be")
    if match := _TOKEN_ID.fullmatch(text):
        return frozenset({int(match[1])})
    vocabulary = needed_vocabulary(ask, place)
    data = text_bytes(text)
    return ANY if data is None else vocabulary.ids_of(data)


def ids_of_bytes(data: Sequence[int], ask: Ask, place: Place) -> frozenset[int]:
    """The ids whose bytes are `data` (a JSON list of byte values), ANY where they are the replacement character's.

    A server that takes the bytes from a text it has decoded sends EF BF BD for every token that is not whole
    characters, which then may be any of those as well as the one token that is U+FFFD itself.
    """
    try:
        raw = bytes(data)
    except (TypeError, ValueError) as error:
        raise place.error(ScoreError, f"{data!r} stands where a token's bytes should be") from error
    vocabulary = needed_vocabulary(ask, place)
    return ANY if REPLACEMENT.encode() in raw else vocabulary.ids_of(raw)


def needed_vocabulary(ask: Ask, place: Place) -> Vocabulary:
    """The ask's vocabulary; EndpointError where there is none."""
    if ask.vocabulary is None:
        raise place.error(
            EndpointError, "the endpoint answers with texts instead of token ids: name the model's tokenizer"
        )
    return ask.vocabulary


def text_bytes(text: str) -> bytes | None:
    """The bytes a text key stands for, None where it does not say (undecodable bytes, nothing at all)."""
    if text.startswith("bytes:") and _ESCAPE.search(text):
        plain = _ESCAPE.sub(lambda m: chr(int(m[1], 16)), text[len("bytes:") :])
        return plain.encode("latin-1") if all(ord(c) < 256 for c in plain) else None
    return None if not text or REPLACEMENT in text else text.encode()


def check_text(text: object, token: int, ask: Ask, place: Place) -> None:
    """Compare a prompt token's text with the vocabulary; ScoreError where it is another token's.

    A text that cannot be compared (cut characters, no vocabulary) passes: the number of tokens is checked
    elsewhere.
    """
    if isinstance(text, str) and (match := _TOKEN_ID.fullmatch(text)):
        same = int(match[1]) == token
    elif not isinstance(text, str):
        raise place.error(ScoreError, f"{text!r} stands where a token's text should be")
    else:
        own = b"" if ask.vocabulary is None else ask.vocabulary.bytes_of(token)
        data = text_bytes(text)
        same = data is None or not _is_text(own) or data == own
    if not same:
        raise place.error(
            ScoreError,
            f"the server scored {text!r} and the window holds token {token}: its prompt is shifted, cut or other text",
        )


def _is_text(data: bytes) -> bool:
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False


def entries_of_map(listed: object, ask: Ask, place: Place) -> list[Entry]:
    """`{text or token_id:N: logprob}` as entries; ScoreError where it is not a map."""
    if not isinstance(listed, dict):
        raise place.error(ScoreError, "the alternatives are missing (top_logprobs)")
    return [Entry(ids_of_text(key, ask, place), as_logprob(value, place), text=key) for key, value in listed.items()]


def entry_of_item(item: Any, ask: Ask, place: Place, *, beside: bool = False) -> Entry:
    """`{id?, token, bytes?, logprob}` as an entry: by id, else by bytes, else by text."""
    if not isinstance(item, dict):
        raise place.error(ScoreError, f"{item!r} stands where a token with its logprob should be")
    logprob = as_logprob(item.get("logprob"), place)
    if item.get("id") is not None:
        return Entry(frozenset({as_id(item["id"], place)}), logprob, beside)
    text, data = item.get("token"), item.get("bytes")
    named = text if isinstance(text, str) else ""
    if data is not None and not (isinstance(text, str) and _TOKEN_ID.fullmatch(text)):
        return Entry(ids_of_bytes(data, ask, place), logprob, beside, named)
    return Entry(ids_of_text(text, ask, place), logprob, beside, named)
