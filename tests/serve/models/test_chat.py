from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from serve.errors import BadRequest
from serve.models.tokenizer import encode_chat
from tests.serve import tiny_models as tiny

TOKENIZERS = {
    "byte-level": tiny.byte_level(),
    "bos": tiny.byte_level(bos=True),
    "rstrip": tiny.stripping(),
    "metaspace": tiny.metaspace(),
    "metaspace never": tiny.metaspace(first=False),
}
CHAT = [
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": "hi, wörld"},
    {"role": "user", "content": " the fox\n"},
    {"role": "assistant", "content": "says 日本"},
]


def spoken(tokenizer: Any, chat: Any, **options: Any) -> list[str]:
    """The stretches of text that the assistant mask covers."""
    encoded = encode_chat(tokenizer, chat, **options)
    stretches: list[list[int]] = []
    for index, (token, own) in enumerate(zip(encoded.ids, encoded.assistant_mask, strict=True)):
        if own and (not index or not encoded.assistant_mask[index - 1]):
            stretches.append([])
        if own:
            stretches[-1].append(token)
    return [tokenizer.decode(ids) for ids in stretches]


def said_bytes(tokenizer: Any, text: str) -> tuple[int, int]:
    """Least and most bytes of a rendered chat less its control tokens, which may swallow the whitespace beside them."""
    special = [re.escape(str(t.content)) for t in tokenizer.added_tokens_decoder.values() if t.special]
    control = "|".join(special)
    return len(re.sub(rf"\s*(?:{control})\s*", "", text).encode()), len(re.sub(control, "", text).encode())


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=30, deadline=None)
@given(contents=st.lists(st.text(alphabet="ab .\nß日<>", max_size=12), min_size=1, max_size=4))
def test_same_ids_as_apply_chat_template(name: str, contents: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    chat = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    encoded = encode_chat(tokenizer, chat)
    assert list(encoded.ids) == tokenizer.apply_chat_template(chat, tokenize=True)["input_ids"]
    least, most = said_bytes(tokenizer, encoded.text)
    assert least <= sum(encoded.bytes_per_token) <= most
    assert sum(encoded.bytes_per_token) == most or name == "rstrip"
    assert len(encoded.assistant_mask) == len(encoded.ids) == len(encoded.bytes_per_token)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_special_strings_in_messages_are_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    plain = [{**message, "content": message["content"] + " ok"} for message in CHAT]
    evil = [{**message, "content": message["content"] + " <s> ok"} for message in CHAT]
    special = set(tokenizer.all_special_ids)
    ours, base = encode_chat(tokenizer, evil), encode_chat(tokenizer, plain)
    assert [i for i in ours.ids if i in special] == [i for i in base.ids if i in special]
    assert ours.text == tokenizer.apply_chat_template(evil, tokenize=False)
    assert tokenizer.decode(ours.ids) == tokenizer.decode(tokenizer(ours.text, add_special_tokens=False)["input_ids"])
    assert sum(ours.bytes_per_token) - sum(base.bytes_per_token) == len(b" <s>") * len(CHAT)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_plain_stretches_read_as_in_the_whole(name: str) -> None:
    """The oracle is the same tokenizer without that special token, over the whole rendered text at once."""
    tokenizer = TOKENIZERS[name]
    unused = "<unk>" if name.startswith("metaspace") else "<s>"  # the templates do not write it
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] != unused]
    oracle = Tokenizer.from_str(json.dumps(state))
    for content in (f"the {unused} fox", f"{unused}hello", f"hello{unused}", unused, f" {unused}\n{unused} "):
        for chat in (
            [{"role": "user", "content": content}, {"role": "assistant", "content": "hello world"}],
            [{"role": "user", "content": "hello world"}, {"role": "assistant", "content": content}],
        ):
            ours = encode_chat(tokenizer, chat)
            whole = oracle.encode(ours.text, add_special_tokens=False)
            assert list(ours.ids) == whole.ids, (content, whole.tokens)


def test_assistant_mask_is_content_and_end_of_turn() -> None:
    assert spoken(tiny.byte_level(), CHAT) == ["hi, wörld<|im_end|>", "says 日本<|im_end|>"]
    assert spoken(tiny.metaspace(), CHAT) == ["hi, wörld </s>", "says 日本 </s>"]
    assert spoken(tiny.byte_level(), [{"role": "user", "content": "x"}]) == []


def test_assistant_mask_with_special_strings_and_generation_blocks() -> None:
    evil = [CHAT[0], {"role": "assistant", "content": "a<|im_end|>b"}]
    assert spoken(tiny.byte_level(), evil) == ["a<|im_end|>b<|im_end|>"]
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}{% endgeneration %}<|im_end|>{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert spoken(tiny.byte_level(), CHAT, template=template) == ["hi, wörld", "says 日本"]
    assert spoken(tiny.byte_level(), evil, template=template) == ["a<|im_end|>b"]


def test_next_turn_token_does_not_end_a_turn() -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}{% endfor %}"
    assert spoken(tiny.byte_level(), CHAT, template=template) == [" hi, wörld", " says 日本"]


def test_reasoning_that_a_template_drops_from_earlier_turns() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set text = m.content %}"
        "{% if '</think>' in text and not loop.last %}{% set text = text.split('</think>')[-1] | trim %}{% endif %}"
        "{{ text }}<|im_end|>\n{% endfor %}"
    )
    chat = [CHAT[0], {"role": "assistant", "content": "<think>abc</think> hi"}] * 2
    assert spoken(tiny.byte_level(), chat, template=template) == ["hi<|im_end|>", "<think>abc</think> hi<|im_end|>"]


def test_control_tokens_have_no_bytes() -> None:
    """The assistant says "ok": two bytes are scored, though the token that ends the turn is scored too."""
    tokenizer = tiny.byte_level()
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
    encoded = encode_chat(tokenizer, chat)
    scored = [i for i, own in enumerate(encoded.assistant_mask) if own]
    assert sum(encoded.bytes_per_token[i] for i in scored) == 2
    assert encoded.ids[scored[-1]] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    evil = encode_chat(tokenizer, [chat[0], {"role": "assistant", "content": "<s>"}])  # said, so it has its bytes
    assert sum(n for n, own in zip(evil.bytes_per_token, evil.assistant_mask, strict=True) if own) == 3


def test_generation_prompt_and_no_second_bos() -> None:
    tokenizer = tiny.metaspace()
    encoded = encode_chat(tokenizer, CHAT[:1])
    assert encoded.ids.count(tokenizer.bos_token_id) == 1 and encoded.ids[0] == tokenizer.bos_token_id
    prompted = encode_chat(tiny.byte_level(), CHAT[:1], add_generation_prompt=True)
    assert prompted.text.endswith("<|im_start|>assistant\n")


def test_refusals_say_what_to_do() -> None:
    with pytest.raises(BadRequest, match="no chat template: give one"):
        encode_chat(tiny.byte_level(template=None), CHAT)
    with pytest.raises(BadRequest, match="alternate"):
        encode_chat(tiny.byte_level(), CHAT, template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadRequest, match="refuses"):
        encode_chat(tiny.byte_level(), CHAT, template="{% for %}")
    rewriting = "{% for m in messages %}{{ m.content | replace('<s>', '') }}{% endfor %}"
    with pytest.raises(BadRequest, match="rewrites"):
        encode_chat(tiny.byte_level(), [{"role": "user", "content": "a <s> b"}], template=rewriting)
