"""Chats on the embedded server: a refused one is named and ends nothing; tool calls and parts are passed on."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

import evalgate
from evalgate.core import Document, Message
from evalgate.server.client import EmbeddedClient
from evalgate.server.process import EmbeddedServer
from tests.serve.architectures import built
from tests.serve.tiny_models import byte_level, save

pytestmark = pytest.mark.slow

NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}<|im_end|>\n{% endfor %}"
)
ASKED = Message("user", "hello")
SAID = Message("assistant", "hi, the fox")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = byte_level(bos=True, template=NO_SYSTEM)
    return str(save(built("llama"), tmp_path_factory.mktemp("model"), tokenizer))


def test_a_refused_chat_is_named_and_the_others_are_read(model: str) -> None:
    call = json.dumps({"tool_calls": [{"function": {"name": "fox", "arguments": "{}"}}]})
    chats = [
        Document("plain", "d", messages=(ASKED, SAID)),
        Document("system", "d", messages=(Message("system", "be brief"), ASKED, SAID)),
        Document("call", "d", messages=(ASKED, Message("assistant", "", call), Message("tool", "42"), SAID)),
        Document(
            "parts", "d", messages=(Message("user", "hello", '{"content":[{"type":"text","text":"hello"}]}'), SAID)
        ),
        Document("tools", "d", messages=(ASKED, SAID), tools='[{"function":{"name":"fox"}}]'),
    ]
    with EmbeddedServer([model], device="cpu") as server, closing(EmbeddedClient(server)) as client:
        plain, system, call_, parts, tools = client.tokenize(model, chats)
    assert system.ids == () and "no system messages" in system.refusal
    assert not any(document.refusal for document in (plain, call_, parts, tools))
    assert parts.ids == plain.ids
    assert sum(call_.bytes_per_token) == sum(plain.bytes_per_token) + len(b"assistant\nfox\ntool\n42\n")
    assert sum(tools.bytes_per_token) == sum(plain.bytes_per_token) + len(b"[fox]") * 2


def test_rows_that_cannot_be_shown_never_end_a_run(model: str, tmp_path: Path) -> None:
    rows = [[ASKED, SAID], [ASKED, Message("assistant", "it is a fox")], [Message("system", "x"), ASKED, SAID], [ASKED]]
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps({"messages": [m.wire() for m in row]}) + "\n" for row in rows))
    run = evalgate.perplexity(model, data=path, context=64, device="cpu")
    assert set(run.tokens["document"]) == {"mixed.jsonl:1", "mixed.jsonl:2"}
    skipped = {s.name: s.reason for s in run.summary.corpus.skipped}
    assert set(skipped) == {"mixed.jsonl:3", "mixed.jsonl:4"}
    assert "no system messages" in skipped["mixed.jsonl:3"]
    assert (
        "chats: control tokens have 0 bytes; the nll of those that end an assistant's turn counts" in run.summary.notes
    )
