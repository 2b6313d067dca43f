"""Chats: templates, entries and bytes, reasoning and tool calls whole and streamed, continued messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from serve.engine.sequence import Sequence
from tests.serve.api.test_completions import assert_close
from tests.serve.serving import Served, served
from tests.serve.tiny_models import CHATML, byte_level

MESSAGES = [{"role": "user", "content": "hello wörld"}]
MARKS = "{# <think> <tool_call> #}"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(tokenizer=byte_level(template=MARKS + CHATML)) as found:
        yield found


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    with served(trust_request_templates=False) as found:
        yield found


def script(at: Served, monkeypatch: pytest.MonkeyPatch, text: str) -> list[int]:
    """Make the model say a text, then <|im_end|>; returns its tokens."""
    from serve.engine import rows
    from serve.engine.sampling import Picks

    ids = [*at.tokenizer.encode(text, add_special_tokens=False), at.tokenizer.eos_token_id]

    def chosen(logits: Any, at: Any, sequences: list[Sequence]) -> Picks:
        said = [ids[min(sequence.generated, len(ids) - 1)] for sequence in sequences]
        return Picks(torch.tensor(said, dtype=torch.int64), torch.zeros(len(said)))

    monkeypatch.setattr(rows, "pick", chosen)
    monkeypatch.setattr(rows, "plain", lambda _: False)
    return ids


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The one choice of a stream as the whole reply would have it."""
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    logprobs: dict[str, list[Any]] | None = None
    for chunk in chunks:
        choice = chunk["choices"][0]
        for name in ("content", "reasoning_content"):
            if name in choice["delta"]:
                message[name] = message.get(name, "") + choice["delta"][name]
        for call in choice["delta"].get("tool_calls", ()):
            assert call["index"] == len(message.setdefault("tool_calls", []))
            message["tool_calls"].append({k: v for k, v in call.items() if k != "index"})
        for name, entries in (choice["logprobs"] or {}).items():
            logprobs = logprobs or {}
            logprobs[name] = logprobs.get(name, []) + entries
    if "tool_calls" in message:
        message["content"] = message["content"] or None
    last = chunks[-1]["choices"][0]
    return {
        "index": 0,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": last["finish_reason"],
        "stop_reason": last["stop_reason"],
    }


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice without the random ids of its calls."""
    for call in choice["message"].get("tool_calls", ()):
        assert call.pop("id").startswith("call_") and call["type"] == "function"
    return choice


def both(at: Served, **body: Any) -> dict[str, Any]:
    """The choice of a reply, after checking that the stream says the same."""
    whole = without_ids(at.chat(**body)["choices"][0])
    assert_close(without_ids(joined(at.stream("/v1/chat/completions", body))), whole)
    return whole


def text_of(entries: list[dict[str, Any]]) -> str:
    return b"".join(bytes(e["bytes"]) for e in entries).decode()


@pytest.mark.parametrize("text", ["plain words", "wörld 日本 🙂 é", "🙂" * 4, "tail 日"])
def test_bytes_of_all_entries_join_to_the_text(server: Served, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    ids = script(server, monkeypatch, text)
    choice = both(server, messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert choice["message"] == {"role": "assistant", "content": text}
    assert choice["finish_reason"] == "stop"
    entries = choice["logprobs"]["content"]
    assert [e["id"] for e in entries] == ids  # the end token too
    assert text_of(entries[:-1]) == text and entries[-1]["token"] == "<|im_end|>"
    for entry in entries:
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
        assert len(entry["top_logprobs"]) == 2


def test_entries_cover_what_a_stop_string_trimmed(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = script(server, monkeypatch, "wörld 日本 hello there")
    choice = both(server, messages=MESSAGES, logprobs=True, stop="hello")
    assert choice["message"]["content"] == "wörld 日本 " and choice["stop_reason"] == "hello"
    entries = choice["logprobs"]["content"]
    assert [e["id"] for e in entries] == ids[: len(entries)]
    assert text_of(entries).startswith("wörld 日本 hello")


def test_reasoning_carries_its_own_logprobs(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    script(server, monkeypatch, "<think>hmm 日</think>\n\nyes")
    choice = both(server, messages=MESSAGES, logprobs=True)
    assert choice["message"]["reasoning_content"] == "hmm 日" and choice["message"]["content"] == "\n\nyes"
    assert text_of(choice["logprobs"]["reasoning_content"]) == "<think>hmm 日</think>"
    assert text_of(choice["logprobs"]["content"]) == "\n\nyes<|im_end|>"
    body = {"messages": MESSAGES, "logprobs": True}
    for chunk in server.stream("/v1/chat/completions", body):
        delta, logprobs = chunk["choices"][0]["delta"], chunk["choices"][0]["logprobs"]
        if logprobs is not None and delta.get("content"):
            assert "reasoning_content" not in logprobs
            assert text_of(logprobs["content"]).removesuffix("<|im_end|>") == delta["content"]
        if logprobs is not None and delta.get("reasoning_content"):
            assert logprobs["content"] == []


def test_tool_calls(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"x": "日"}}\n</tool_call>'
    script(server, monkeypatch, f"<think>a</think>Look.\n{call}\n{call}")
    choice = both(server, messages=MESSAGES, logprobs=True, tools=TOOLS)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Look." and choice["message"]["reasoning_content"] == "a"
    functions = [c["function"] for c in choice["message"]["tool_calls"]]
    assert [f["name"] for f in functions] == ["f", "f"]
    assert all(json.loads(f["arguments"]) == {"x": "日"} for f in functions)
    assert text_of(choice["logprobs"]["content"]) == "Look."
    assert text_of(choice["logprobs"]["tool_calls"]) == f"\n{call}\n{call}<|im_end|>"
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        unread = both(server, messages=MESSAGES, **fields)
        assert unread["finish_reason"] == "stop" and unread["message"]["content"] == f"Look.\n{call}\n{call}"


def test_a_real_sample_streams_like_its_reply(server: Served) -> None:
    for seed in range(6):
        body = {"messages": MESSAGES, "max_tokens": 20, "seed": seed, "logprobs": True, "top_logprobs": 3}
        choice = both(server, **body, stop=["a", "日"], temperature=1.3)
        lists = choice["logprobs"]
        assert sum(map(len, lists.values())) <= 20


def test_prompt_is_the_template_s(server: Served) -> None:
    reply = server.chat(messages=MESSAGES, max_tokens=0, return_token_ids=True, prompt_logprobs=0)
    rendered = server.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert reply["prompt_token_ids"] == server.tokenizer.encode(rendered, add_special_tokens=False)
    assert [list(e or {})[:1] for e in reply["prompt_logprobs"]] == [
        [] if i == 0 else [str(t)] for i, t in enumerate(reply["prompt_token_ids"])
    ]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello wörld"}]}]
    assert (
        server.chat(messages=parts, max_tokens=0, return_token_ids=True)["prompt_token_ids"]
        == reply["prompt_token_ids"]
    )
    same = server.post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": True})
    assert same["tokens"] == reply["prompt_token_ids"]


def test_a_final_message_is_continued(server: Served) -> None:
    chat = [*MESSAGES, {"role": "assistant", "content": "The <s> is "}]
    reply = server.chat(messages=chat, continue_final_message=True, max_tokens=0, return_token_ids=True)
    text = server.post("/detokenize", {"tokens": reply["prompt_token_ids"]})["prompt"]
    rendered = server.tokenizer.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert text == rendered and text.endswith("The <s> is ")
    assert 0 not in reply["prompt_token_ids"]  # <s> in a message is text
    half = [*MESSAGES, {"role": "assistant", "content": "<think>well"}]
    choice = server.chat(messages=half, continue_final_message=True, max_tokens=3, ignore_eos=True)["choices"][0]
    assert choice["message"]["content"] == "" and "reasoning_content" in choice["message"]


def test_max_tokens_by_either_name_and_by_default(server: Served) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        reply = server.chat(messages=MESSAGES, ignore_eos=True, **{name: 4})
        assert reply["usage"]["completion_tokens"] == 4
    reply = server.chat(messages=MESSAGES, ignore_eos=True)
    assert reply["usage"]["total_tokens"] == 256 and reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 256}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "audio": {}}]}, "messages[0].audio"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"echo": True}, "echo"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        (
            {"continue_final_message": True, "messages": [{"role": "assistant", "content": ""}]},
            "continue_final_message",
        ),
        ({"chat_template": "{{ oops("}, "messages"),
        ({"chat_template": "{{ 1 / 0 }}"}, "messages"),
        ({"chat_template": "{% for i in range(1000000) %}x{% endfor %}"}, "messages"),
    ],
    ids=str,
)
def test_refusals_name_the_field(server: Served, fields: dict[str, Any], param: str) -> None:
    error = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, **fields}, status=400)["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error"


def test_templates_of_requests_are_off_beyond_loopback(plain: Served) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        error = plain.post(path, {"messages": MESSAGES, "chat_template": "x"}, status=400)["error"]
        assert error["param"] == "chat_template"


def test_no_parser_without_marks(plain: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    script(plain, monkeypatch, "<think>x</think>y")
    assert both(plain, messages=MESSAGES)["message"] == {"role": "assistant", "content": "<think>x</think>y"}
