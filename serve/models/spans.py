"""Token ids with the characters they come from, and the bytes of one token."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np

from serve.errors import BadRequest
from serve.models.offsets import corrected

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
LOOKAHEAD = 32  # bytes that a slow tokenizer may drop between two pieces (runs of whitespace)

_locks: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()
_making = threading.Lock()


def encoding_lock(tokenizer: Any) -> threading.Lock:
    """The lock to hold while a tokenizer encodes: `split_special_tokens` is a state of its backend, not of a call.

    One for each tokenizer, so that a long text for one model does not keep the others waiting.
    """
    with _making:
        return _locks.setdefault(tokenizer, threading.Lock())


def longest_token(tokenizer: Any) -> int:
    """Characters of the vocabulary's longest token: n tokens can stand for no more than n times as many."""
    known = _longest.get(tokenizer)
    if known is None:
        known = _longest[tokenizer] = max(map(len, tokenizer.get_vocab()), default=1)
    return known


_longest: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


@dataclass(frozen=True)
class Pieces:
    """Tokens of a text: spans[i] = [start, end) in characters; pieces of one character share its span."""

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


def encode_pieces(tokenizer: Any, text: str, *, plain: bool) -> Pieces:
    """Tokenize without adding anything; `plain` reads special tokens in the text as plain text.

    Raises BadRequest for text that is not valid Unicode (lone surrogates).
    """
    text_bytes(text)
    options = {"add_special_tokens": False, "split_special_tokens": plain, "verbose": False}
    with encoding_lock(tokenizer):
        if tokenizer.is_fast:
            encoded = tokenizer(text, return_offsets_mapping=True, **options)
            spans = [(int(start), int(end)) for start, end in encoded["offset_mapping"]]
            ids = tuple(encoded["input_ids"])
            return Pieces(ids, corrected(text, ids, spans, lambda index: token_bytes(tokenizer, index)))
        ids = tuple(tokenizer(text, **options)["input_ids"])
    return Pieces(ids, _align(text, [token_bytes(tokenizer, index) for index in ids]))


def bytes_per_token(text: str, spans: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """UTF-8 bytes that each token adds; they sum to the text's bytes.

    A character split over several tokens counts for the first one that touches it; characters that no
    token covers count for the next token, and those after the last token for the last one.
    Raises BadRequest where a text that is not empty has no token.
    """
    offsets = _byte_offsets(text)
    total = int(offsets[-1])
    if not spans:
        if total:
            raise BadRequest("the text has no token in this model's vocabulary: give another text")
        return ()
    counts, reached = [], 0
    for _, end in spans:
        upto = max(reached, int(offsets[end]))
        counts.append(upto - reached)
        reached = upto
    counts[-1] += total - reached
    return tuple(counts)


def token_bytes(tokenizer: Any, index: int) -> bytes:
    """The bytes that one token stands for; b"" for an id that the vocabulary does not name (padding rows).

    Byte-level pieces and byte-fallback tokens may be part of a character.
    """
    alphabet = _alphabet(tokenizer)
    known = alphabet.known.get(index)
    if known is None:
        known = alphabet.known[index] = _bytes_of(tokenizer, alphabet, index)
    return known


def _bytes_of(tokenizer: Any, alphabet: _Alphabet, index: int) -> bytes:
    added = alphabet.added.get(index)
    if added is not None:
        return added.encode()
    if not 0 <= index < alphabet.size:
        return b""
    token = tokenizer.convert_ids_to_tokens(index)
    return b"" if token is None else alphabet.decode(token)


@dataclass(frozen=True)
class _Alphabet:
    """How a vocabulary writes bytes: GPT-2's byte alphabet, sentencepiece's marks, WordPiece's, or as is.

    size: ids that the vocabulary may name (counting them anew costs more than reading one). known: bytes read so far.
    """

    kind: Literal["byte-level", "sentencepiece", "wordpiece", "plain"]
    added: dict[int, str]
    size: int
    known: dict[int, bytes] = field(default_factory=dict)

    def decode(self, token: str) -> bytes:
        if self.kind == "byte-level":
            values = [_BYTE_OF.get(character) for character in token]
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else token.encode()
        if self.kind == "sentencepiece":
            match = BYTE_TOKEN.fullmatch(token)
            return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()
        return (token.removeprefix("##") if self.kind == "wordpiece" else token).encode()


_alphabets: WeakKeyDictionary[Any, _Alphabet] = WeakKeyDictionary()


def _alphabet(tokenizer: Any) -> _Alphabet:
    known = _alphabets.get(tokenizer)
    if known is None:
        added = {index: str(token.content) for index, token in tokenizer.added_tokens_decoder.items()}
        known = _alphabets[tokenizer] = _Alphabet(_kind(tokenizer), added, len(tokenizer))
    return known


def _kind(tokenizer: Any) -> Literal["byte-level", "sentencepiece", "wordpiece", "plain"]:
    if not tokenizer.is_fast:
        if hasattr(tokenizer, "byte_decoder"):
            return "byte-level"
        return "sentencepiece" if hasattr(tokenizer, "sp_model") else "plain"
    backend = tokenizer.backend_tokenizer
    parts = {name for part in (backend.decoder, backend.pre_tokenizer) for name in _part_types(part)}
    if "ByteLevel" in parts:
        return "byte-level"
    if parts & {"Metaspace", "ByteFallback"}:
        return "sentencepiece"
    return "wordpiece" if "WordPiece" in parts else "plain"


def _part_types(part: Any) -> Iterator[str]:
    """Type names of a decoder or pre-tokenizer of the tokenizers library, sequences flattened."""
    if part is None:
        return
    queue = [json.loads(part.__getstate__())]
    while queue:
        state = queue.pop()
        yield state["type"]
        queue += state.get("decoders", []) + state.get("pretokenizers", [])


def text_bytes(text: str) -> bytes:
    """UTF-8 of a text. Raises BadRequest for lone surrogates."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"the text has a lone surrogate at character {error.start}: send valid Unicode") from error


def _byte_offsets(text: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Bytes before each character, and in all: length len(text) + 1."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    sizes = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def _align(text: str, pieces: Sequence[bytes]) -> tuple[tuple[int, int], ...]:
    """Character spans for a tokenizer that reports none: each piece's bytes are looked for in order."""
    data, offsets = text_bytes(text), _byte_offsets(text)
    spans, cursor = [], 0
    for piece in pieces:
        start, end = _find(data, piece, cursor)
        first = int(np.searchsorted(offsets, start, side="right")) - 1
        spans.append((first, max(first, int(np.searchsorted(offsets, end)))))
        cursor = end
    return tuple(spans)


def _find(data: bytes, piece: bytes, cursor: int) -> tuple[int, int]:
    """[start, end) of the piece at or soon after the cursor; empty where it is not there."""
    for form in dict.fromkeys((piece, piece.strip(b" "))):
        if form:
            start = data.find(form, cursor, cursor + len(form) + LOOKAHEAD)
            if start >= 0:
                return start, start + len(form)
    return cursor, cursor


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's byte-level alphabet: printable bytes stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
