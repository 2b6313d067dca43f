"""Chats on the embedded server: a refused one is named and ends nothing; tool calls and parts are passed on."""

from __future__ import annotations

import json
import math
from contextlib import closing
from pathlib import Path

import pytest

import evalgate
from evalgate.core import Document, Message
from evalgate.corpora import load_corpus
from evalgate.errors import ServerError
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
        Document("with text", "d", text="System: be brief", messages=(Message("system", "be brief"), ASKED, SAID)),
    ]
    with EmbeddedServer([model], device="cpu") as server, closing(EmbeddedClient(server)) as client:
        plain, system, call_, parts, tools, with_text = client.tokenize(model, chats)
    assert system.ids == () and "no system messages" in system.refusal
    assert not any(document.refusal for document in (plain, call_, parts, tools))
    assert parts.ids == plain.ids
    assert sum(call_.bytes_per_token) == sum(plain.bytes_per_token) + len(b"assistant\nfox\ntool\n42\n")
    assert sum(tools.bytes_per_token) == sum(plain.bytes_per_token) + len(b"[fox]") * 2
    assert "no system messages" in with_text.plain and not with_text.refusal
    assert sum(with_text.bytes_per_token) == len("System: be brief") and not with_text.scored


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


def test_a_model_without_a_template_is_shown_the_plain_text_of_our_chats(tmp_path: Path) -> None:
    """The default corpus works with a base model: every domain has finite figures, and a note says what was shown."""
    bare = str(save(built("llama"), tmp_path / "bare", byte_level(bos=True, template=None)))
    run = evalgate.perplexity(bare, context=32, limit=9, device="cpu")
    figures = {
        group.name: group.metrics["perplexity"].statistics["candidate"] for group in run.summary.comparisons[0].domains
    }
    assert set(figures) == {"prose", "code", "chat", "maths", "tools", "german", "spanish", "russian", "chinese"}
    assert all(math.isfinite(figure.value) for figure in figures.values())
    chats = {d.name for d in load_corpus(None).documents if d.messages} & set(run.tokens["document"])
    assert chats
    said = "shown as plain text and scored whole: the model has no chat template"
    assert [note for note in run.summary.notes if said in note and note.startswith(str(len(chats)))]
    assert run.summary.corpus.name == "evalgate corpus v1"
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": [ASKED.wire(), SAID.wire()]}))
    with pytest.raises(ServerError, match="no chat template"):
        evalgate.perplexity(bare, data=path, context=32, device="cpu")
