"""A prompt: its ids, and, for who asks to see them, the caller's text and where in it each token begins."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from serve.api.detokenize import Detokenizer
from serve.models.tokenizer import encode_text, prefix_ids, token_bytes

_characters: WeakKeyDictionary[Any, dict[int, int | None]] = WeakKeyDictionary()


class _Shown(NamedTuple):
    """offsets[i]: the first character of token i in `text`; a BOS that was added has no width and no text."""

    text: str
    offsets: tuple[int, ...]


class Prompt:
    """Ids to run. The text of a prompt that came as ids is made only where it is looked at.

    A window that is scored by continuations has a prompt for each of its positions: nobody wants to see the text of
    each, and making it would cost more than the scores do.
    """

    def __init__(self, tokenizer: Any, ids: Sequence[int], shown: _Shown | None = None) -> None:
        self.ids = tuple(ids)
        self._tokenizer = tokenizer
        self._given = shown

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
        return cls(tokenizer, (*prefix, *encoded.ids), _Shown(text, (*(0 for _ in prefix), *offsets)))

    @classmethod
    def of_ids(cls, tokenizer: Any, ids: Sequence[int]) -> Prompt:
        """Ids as they are; the text is what they read as, control tokens written out."""
        return cls(tokenizer, ids)

    @property
    def text(self) -> str:
        """The caller's text, or what the ids read as."""
        return self._shown.text

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first character of each token in `text`."""
        return self._shown.offsets

    @property
    def characters(self) -> int:
        """How long `text` is. It is not made for that where every token has whole characters."""
        whole = None if self._given is not None else _whole_characters(self._tokenizer, self.ids)
        return len(self.text) if whole is None else whole

    @cached_property
    def _shown(self) -> _Shown:
        return self._given or _read(self._tokenizer, self.ids)


def _read(tokenizer: Any, ids: Sequence[int]) -> _Shown:
    """The text that the ids read as, and the first character of each in it."""
    detokenizer = Detokenizer(tokenizer, hide_special=False)
    parts, offsets, at = list[str](), list[int](), 0
    for token in ids:
        text, lead, _ = detokenizer.read(token)
        parts.append(text)
        offsets.append(at + lead)
        at += len(text)
    return _Shown("".join([*parts, detokenizer.rest()]), tuple(offsets))


def _whole_characters(tokenizer: Any, ids: Sequence[int]) -> int | None:
    """Characters of all ids; None where a token begins or ends inside of one."""
    known = _characters.setdefault(tokenizer, {})
    for token in set(ids).difference(known):
        try:
            known[token] = len(token_bytes(tokenizer, token).decode())
        except UnicodeDecodeError:
            known[token] = None
    counts = [known[token] for token in ids]
    return None if None in counts else sum(filter(None, counts))


def _starts(sizes: Sequence[int]) -> tuple[int, ...]:
    """Where each piece begins."""
    return tuple(accumulate(sizes, initial=0))[: len(sizes)]
