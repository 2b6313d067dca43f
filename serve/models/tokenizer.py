"""Text to tokens and back. Special tokens in a text are plain text; only templates make control tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serve.errors import LoadFailed
from serve.models.chat import EncodedChat, encode_chat
from serve.models.spans import bytes_per_token, encode_pieces, encoding_lock, longest_token, token_bytes

__all__ = [
    "Encoded",
    "EncodedChat",
    "decode",
    "encode_chat",
    "encode_text",
    "longest_token",
    "prefix_ids",
    "token_bytes",
    "token_text",
]

PROBES = ("a", "1", "the", ".")


@dataclass(frozen=True)
class Encoded:
    """Token ids of a text and the UTF-8 bytes that each adds (they sum to the text's bytes)."""

    ids: tuple[int, ...]
    bytes_per_token: tuple[int, ...]


def encode_text(tokenizer: Any, text: str) -> Encoded:
    """Tokenize a text as plain text: no BOS, and `<unk>` in it is five characters.

    Raises BadRequest for text that is not valid Unicode or that has no token.
    """
    pieces = encode_pieces(tokenizer, text, plain=True)
    return Encoded(pieces.ids, bytes_per_token(text, pieces.spans))


def prefix_ids(tokenizer: Any) -> tuple[int, ...]:
    """The ids that the tokenizer's own configuration puts before a text: none, BOS, or several (GLM: [gMASK] <sop>).

    Found by encoding a probe: `bos_token_id` may be set where no BOS is ever added (Qwen, GPT-2).
    Raises LoadFailed where special tokens change how a plain letter is encoded.
    """
    for probe in PROBES:
        bare = encode_pieces(tokenizer, probe, plain=False).ids
        with encoding_lock(tokenizer):
            full = tuple(tokenizer(probe, add_special_tokens=True)["input_ids"])
        if not bare:
            continue
        before = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), None)
        if before is not None:
            return tuple(int(token) for token in full[:before])
    raise LoadFailed("the tokenizer encodes a plain letter differently with special tokens than without: use another")


def decode(tokenizer: Any, ids: Sequence[int], *, skip_special: bool = False) -> str:
    """The text of a sequence of ids; special tokens are written out unless skipped."""
    text = tokenizer.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
    return str(text)


def token_text(tokenizer: Any, index: int) -> str:
    """One token's text, leading space kept; a piece of a character reads as U+FFFD."""
    return token_bytes(tokenizer, index).decode("utf-8", "replace")
