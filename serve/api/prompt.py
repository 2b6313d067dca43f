"""A prompt: its ids, the caller's text, and where in it each token begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from serve.api.detokenize import Detokenizer
from serve.models.tokenizer import encode_text, prefix_ids


@dataclass(frozen=True)
class Prompt:
    """offsets[i]: the first character of token i in `text`; a BOS that was added has no width and no text."""

    ids: tuple[int, ...]
    text: str
    offsets: tuple[int, ...]

    @classmethod
    def of_text(cls, tokenizer: Any, text: str, *, add_bos: bool) -> Prompt:
        """Plain text, with BOS where asked for and the tokenizer's own configuration adds one.

        Raises BadRequest for text that is not valid Unicode or has no token.
        """
        encoded = encode_text(tokenizer, text)
        read = _read(tokenizer, encoded.ids)
        if read.text == text:
            offsets = read.offsets
        else:  # the tokenizer normalises, or marks the text's start: go by the bytes that each token covers
            data = text.encode()
            offsets = tuple(len(data[:at].decode("utf-8", "ignore")) for at in _starts(encoded.bytes_per_token))
        prefix = prefix_ids(tokenizer) if add_bos else ()
        return cls((*prefix, *encoded.ids), text, (*(0 for _ in prefix), *offsets))

    @classmethod
    def of_ids(cls, tokenizer: Any, ids: Sequence[int]) -> Prompt:
        """Ids as they are; the text is what they read as, control tokens written out."""
        return _read(tokenizer, ids)


def _read(tokenizer: Any, ids: Sequence[int]) -> Prompt:
    """The ids with the text that they read as, and the first character of each in it."""
    detokenizer = Detokenizer(tokenizer, hide_special=False)
    parts, offsets, at = list[str](), list[int](), 0
    for token in ids:
        text, lead, _ = detokenizer.read(token)
        parts.append(text)
        offsets.append(at + lead)
        at += len(text)
    return Prompt(tuple(ids), "".join([*parts, detokenizer.rest()]), tuple(offsets))


def _starts(sizes: Sequence[int]) -> tuple[int, ...]:
    """Where each piece begins."""
    return tuple(accumulate(sizes, initial=0))[: len(sizes)]
