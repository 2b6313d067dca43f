from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers.tokenization_python import PreTrainedTokenizer

from serve.errors import BadRequest
from serve.models.spans import bytes_per_token
from serve.models.tokenizer import decode, encode_text, prefix_ids, token_bytes, token_text
from tests.serve import tiny_models as tiny


class SlowCharacters(PreTrainedTokenizer):
    """A slow tokenizer: one token per character, whitespace runs dropped."""

    def __init__(self, **options: Any) -> None:
        self._letters = "abcdefghijklmnopqrstuvwxyz.<>/|_é日"
        super().__init__(unk_token="<unk>", bos_token="<s>", **options)

    @property
    def vocab_size(self) -> int:
        return len(self._letters)

    def get_vocab(self) -> dict[str, int]:
        return {c: i for i, c in enumerate(self._letters)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [c for c in text if not c.isspace()]

    def _convert_token_to_id(self, token: str) -> int:
        found = self._letters.find(token)
        return found if found >= 0 else self.added_tokens_encoder["<unk>"]

    def _convert_id_to_token(self, index: int) -> str:
        return self._letters[index]

    def build_inputs_with_special_tokens(self, ids: list[int], other: list[int] | None = None) -> list[int]:
        return [self.bos_token_id, *ids]


TOKENIZERS = {
    "byte-level": tiny.byte_level(),
    "byte-level untrimmed": tiny.byte_level(trim=False),
    "metaspace": tiny.metaspace(),
    "metaspace never": tiny.metaspace(first=False),
    "slow": SlowCharacters(),
}
TEXTS = st.text(alphabet=st.sampled_from(list("ab .\n<s>|/_éß日🙂\u0301\t")), max_size=24) | st.text(max_size=12)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_bytes_sum_to_the_text(name: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        with pytest.raises(BadRequest, match="surrogate"):
            encode_text(TOKENIZERS[name], text)
        return
    try:
        encoded = encode_text(TOKENIZERS[name], text)
    except BadRequest as error:
        assert "no token" in error.message and text
        return
    assert len(encoded.ids) == len(encoded.bytes_per_token)
    assert sum(encoded.bytes_per_token) == size
    assert min(encoded.bytes_per_token, default=0) >= 0


def test_special_strings_are_plain_text() -> None:
    for name, tokenizer in TOKENIZERS.items():
        encoded = encode_text(tokenizer, "a <s> b")
        assert tokenizer.bos_token_id not in encoded.ids, name
        if name != "slow":
            assert decode(tokenizer, encoded.ids) == "a <s> b", name
        assert tokenizer.bos_token_id in tokenizer("a <s> b", add_special_tokens=False)["input_ids"], name


def test_a_split_character_counts_for_its_first_piece() -> None:
    tokenizer = tiny.byte_level()
    encoded = encode_text(tokenizer, "a𓀀b")
    assert b"".join(token_bytes(tokenizer, i) for i in encoded.ids) == "a𓀀b".encode()
    assert encoded.bytes_per_token == (1, 4, 0, 0, 0, 1)
    fallback = tiny.metaspace(first=False)
    encoded = encode_text(fallback, "a日b")
    assert encoded.bytes_per_token == (1, 3, 0, 0, 1)
    assert [token_bytes(fallback, i) for i in encoded.ids[1:4]] == [b"\xe6", b"\x97", b"\xa5"]


def test_uncovered_bytes_go_to_the_next_token() -> None:
    assert bytes_per_token("é x  ", [(0, 1), (2, 3)]) == (2, 4)  # " x", and the trailing blanks to the last token
    assert bytes_per_token("  x", [(2, 3)]) == (3,)
    with pytest.raises(BadRequest, match="no token"):
        bytes_per_token("x", [])


def test_bytes_of_every_byte_level_token_join_to_the_text() -> None:
    tokenizer, text = tiny.byte_level(), "the wörld 日本 🙂 says\n\thello"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert b"".join(token_bytes(tokenizer, i) for i in ids) == text.encode()
    assert token_bytes(tokenizer, 1) == b"<|im_start|>"
    assert token_bytes(tokenizer, 10_000) == b"" == token_bytes(tokenizer, -1)
    assert token_text(tokenizer, ids[1]).startswith(" ")
    piece = next(i for i in ids if token_bytes(tokenizer, i)[0] >= 0x80)
    assert "\ufffd" in token_text(tokenizer, piece)


def test_the_prefix_is_what_the_configuration_adds() -> None:
    assert prefix_ids(tiny.byte_level()) == ()  # bos_token is set, but nothing adds it
    assert prefix_ids(tiny.byte_level(bos=True)) == (0,)
    assert prefix_ids(tiny.metaspace()) == (1,)
    assert prefix_ids(SlowCharacters()) == (SlowCharacters().bos_token_id,)
    appended = tiny.byte_level()
    appended.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", 2)]
    )
    assert prefix_ids(appended) == ()
    twice = tiny.byte_level()
    twice.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> <|im_start|> $A", special_tokens=[("<s>", 0), ("<|im_start|>", 1)]
    )
    assert prefix_ids(twice) == (0, 1)  # as GLM's do


def test_decode_skips_special_tokens_only_on_request() -> None:
    tokenizer = tiny.byte_level()
    ids = tokenizer("hello<|im_end|>")["input_ids"]
    assert decode(tokenizer, ids) == "hello<|im_end|>"
    assert decode(tokenizer, ids, skip_special=True) == "hello"
