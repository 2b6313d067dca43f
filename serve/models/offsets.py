"""Character spans of tokens, corrected where a normalizer inserted or composed text.

The tokenizers library gives an inserted character ("▁" before a text) the span of the letter after it, and a composed
one ("é" from "e" and a combining accent) the span of its first letter alone. By such spans a letter's bytes count for
the mark, which is never scored where it comes first, and an accent's bytes for the next token.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Sequence

Span = tuple[int, int]


def corrected(text: str, ids: Sequence[int], spans: Sequence[Span], decode: Callable[[int], bytes]) -> tuple[Span, ...]:
    """The spans, [start, end) in characters, such that what tokens decode to agrees with the text under them.

    decode: the bytes that one id stands for. Tokens that hold nothing but inserted text get an empty span at its place;
    composed text covers all characters that it was composed of. All other spans stay as they are.
    """
    fixed = list(spans)
    for first, last in _groups(spans):
        start, end = spans[first]
        after = spans[last][0] if last < len(spans) else len(text)
        if last - first == 1 and after <= end:
            continue  # one token, and the next one begins where it ends
        pieces = [decode(index) for index in ids[first:last]]
        if after > end and _same(text[start:after], b"".join(pieces)):
            fixed[first:last] = [(start, after)] * (last - first)
        for i in range(first, first + _inserted(text[start:end], pieces)):
            fixed[i] = (start, start)
    return tuple(fixed)


def _groups(spans: Sequence[Span]) -> Iterator[tuple[int, int]]:
    """[first, last) of tokens in a row that have one span."""
    first = 0
    for i in range(1, len(spans) + 1):
        if i == len(spans) or spans[i] != spans[first]:
            yield first, i
            first = i


def _inserted(text: str, pieces: Sequence[bytes]) -> int:
    """How many of a group's first tokens lie before the text that all of them share."""
    whole, real = b"".join(pieces), text.encode()
    if not real or len(whole) <= len(real) or not whole.endswith(real):
        return 0
    room, count = len(whole) - len(real), 0
    while len(pieces[count]) <= room:
        room -= len(pieces[count])
        count += 1
    return count


def _same(text: str, decoded: bytes) -> bool:
    """Whether the bytes are the text in another normal form."""
    try:
        written = decoded.decode()
    except UnicodeDecodeError:
        return False
    return any(unicodedata.normalize(form, text) == unicodedata.normalize(form, written) for form in ("NFC", "NFKC"))
