"""Spans agree with what tokens decode to, whatever a normalizer inserted or composed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from serve.models.spans import bytes_per_token, encode_pieces, token_bytes
from serve.models.tokenizer import encode_text
from tests.serve.tiny_models import byte_level, metaspace


@pytest.mark.parametrize("text", ["日本", "本日", "日日"])
def test_an_inserted_mark_has_no_bytes(text: str) -> None:
    """Without BOS the first token is never scored: it must not take the first letter's bytes with it."""
    encoded = encode_text(metaspace(), text)
    assert encoded.bytes_per_token[0] == 0
    assert sum(encoded.bytes_per_token[1:]) == len(text.encode())
    spans = encode_pieces(metaspace(), text, plain=True).spans
    assert [start for start, _ in spans] == [0, 0, 0, 0, 1, 1, 1]


def test_a_space_that_is_in_the_text_keeps_its_byte() -> None:
    pieces = encode_pieces(metaspace(), "  hello", plain=True)
    assert bytes_per_token("  hello", pieces.spans) == (1, 6)
    assert encode_pieces(metaspace(), "hello", plain=True).spans == ((0, 5),)


@pytest.mark.parametrize(
    ("normalizer", "text", "sizes"),
    [
        (normalizers.NFC(), "e\u0301x", (3, 0, 1)),
        (normalizers.NFC(), "xe\u0301", (1, 3, 0)),
        (normalizers.NFC(), "\u1112\u1161\u11abx", (9, 0, 0, 1)),
        (normalizers.NFKC(), "\ufb01x", (3, 0, 1)),
        (normalizers.NFD(), "éx", (2, 0, 0, 1)),
        (normalizers.Lowercase(), "İx", (2, 0, 0, 1)),
        (normalizers.Prepend("▁"), "éx", (0, 0, 0, 2, 0, 1)),
        (normalizers.Replace(" ", "▁"), "a b", (1, 1, 0, 0, 1)),
    ],
)
def test_composed_and_inserted_text(normalizer: normalizers.Normalizer, text: str, sizes: tuple[int, ...]) -> None:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.normalizer = normalizer
    assert encode_text(tokenizer, text).bytes_per_token == sizes


@given(st.text(st.sampled_from("ae\u0301\u0308 ▁日本\ufb01가ᄒ\u1161x\n"), max_size=12))
def test_bytes_add_up_and_spans_stay_in_order(text: str) -> None:
    for tokenizer in (METASPACE, COMPOSING):
        pieces = encode_pieces(tokenizer, text, plain=True)
        if not pieces.ids:
            continue
        assert sum(bytes_per_token(text, pieces.spans)) == len(text.encode())
        starts = [start for start, _ in pieces.spans]
        assert starts == sorted(starts)
        assert all(0 <= start <= end <= len(text) for start, end in pieces.spans)
        for index, (start, end) in zip(pieces.ids, pieces.spans, strict=True):
            if start == end:
                assert token_bytes(tokenizer, index).decode("utf-8", "replace").strip(" ▁\ufffd") == ""


METASPACE = metaspace()
COMPOSING = byte_level()
COMPOSING.backend_tokenizer.normalizer = normalizers.NFC()
