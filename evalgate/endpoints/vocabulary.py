"""A tokenizer's tokens as bytes, both ways."""

from __future__ import annotations

from collections.abc import Sequence


class ByteVocabulary:
    """tokens[id] = the bytes that the id adds to a text; several ids may have the same (dialects.base.Vocabulary)."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = tuple(tokens)
        ids: dict[bytes, list[int]] = {}
        for token, data in enumerate(self._tokens):
            ids.setdefault(data, []).append(token)
        self._ids = {data: frozenset(found) for data, found in ids.items()}

    def bytes_of(self, token: int) -> bytes:
        """Bytes of `token`; empty for an id beyond the tokenizer (padded rows of a head)."""
        return self._tokens[token] if 0 <= token < len(self._tokens) else b""

    def ids_of(self, data: bytes) -> frozenset[int]:
        """Every id whose bytes are `data`."""
        return self._ids.get(data, frozenset())
