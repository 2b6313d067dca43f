"""The corpus that comes with evalgate: fixed, balanced, clean, licensed, and the same as its sources make."""

from __future__ import annotations

import gzip
import importlib.util
import json
import subprocess
import sys
import unicodedata
from collections import Counter
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest

from evalgate.core import Document, TokenizedDocument, WindowPolicy
from evalgate.corpora import NAMED, Corpus, is_named, load_corpus, shipped
from evalgate.corpora.chats import plain_text, read_chat, read_tools
from evalgate.errors import InputError, UsageError
from evalgate.measure.cutting import limit_of
from evalgate.measure.request import NAMED_LIMIT, RunRequest
from evalgate.windows import cut, policy, tokenized

ROOT = Path(__file__).parents[3]
DOMAINS = ("prose", "code", "chat", "maths", "tools", "german", "spanish", "russian", "chinese")
SHA256 = "0585fd68ec7b63f16c8e4bb8ec741cd71c4fc2abe493d8d554bce71cbbe7981f"
HASH = "1dee53a625e6a9bdc42e4cba47c4ec10"


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus(None)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    return shipped.rows()


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    """corpus/build.py as a module."""
    spec = importlib.util.spec_from_file_location("corpus_build", ROOT / "corpus" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def words(document: Document) -> list[TokenizedDocument]:
    """The document by a tokenizer of words: a stand-in that tells its plain text from its messages."""
    text = document.text if document.text else "".join(m.content for m in document.messages)
    pieces = text.split() or ["x"]
    ids = tuple(range(1, len(pieces) + 1))
    return [TokenizedDocument(document.name, document.domain, ids, (1,) * len(ids), prefix=(0,))]


class TestVersion1:
    def test_never_changes(self, corpus: Corpus) -> None:
        """A change of the text is a new version: results name version and hash."""
        assert corpus.name == "evalgate corpus v1"
        assert (corpus.hash, shipped.manifest(1).hash, shipped.manifest(1).sha256) == (HASH, HASH, SHA256)
        assert not corpus.skipped

    def test_is_what_its_sources_make(self, builder: ModuleType) -> None:
        made = builder.rows()
        assert builder.encoded(made) == gzip.decompress(shipped.manifest(1).path.read_bytes())

    def test_is_small(self) -> None:
        """Less than 2 MB in the wheel, with its manifest and licences."""
        assert sum(path.stat().st_size for path in shipped.FOLDER.iterdir()) < 2_000_000

    def test_every_name_of_it_is_the_same_text(self, corpus: Corpus) -> None:
        assert load_corpus("evalgate") == load_corpus("evalgate-v1") == corpus

    def test_domains(self, corpus: Corpus) -> None:
        counts = Counter(d.domain for d in corpus.documents)
        assert counts == shipped.manifest(1).domains
        assert tuple(counts) == DOMAINS
        assert set(counts.values()) == {36}

    def test_any_prefix_is_balanced(self, corpus: Corpus) -> None:
        counts = Counter(dict.fromkeys(DOMAINS, 0))
        for document in corpus.documents:
            counts[document.domain] += 1
            assert max(counts.values()) - min(counts.values()) <= 1

    def test_text_is_clean(self, corpus: Corpus) -> None:
        """Unicode's NFC, no stray characters, no blanks at the end of a line, and no document without substance."""
        for document in corpus.documents:
            assert unicodedata.normalize("NFC", document.text) == document.text, document.name
            assert document.name.isascii() and document.name.startswith(f"{document.domain}/")
            assert not set(document.text) & set("\r\0\ufeff\ufffd\u200b"), document.name
            assert document.text == document.text.strip("\n") + "\n", document.name
            assert len(document.text) >= 400, document.name
            if not document.messages:
                assert all(line == line.rstrip() for line in document.text.split("\n")), document.name

    def test_no_document_is_nearly_another(self, builder: ModuleType, rows: list[dict[str, object]]) -> None:
        assert not list(builder.alike(rows))
        copied = {**rows[0], "id": "prose/copy"}
        assert [pair[:2] for pair in builder.alike([rows[0], copied])] == [(rows[0]["id"], "prose/copy")]

    def test_scripts(self, corpus: Corpus) -> None:
        def share(domain: str, script: str) -> float:
            letters = [c for d in corpus.documents if d.domain == domain for c in d.text if c.isalpha()]
            return sum(unicodedata.name(c).startswith(script) for c in letters) / len(letters)

        assert share("russian", "CYRILLIC") > 0.98
        assert share("chinese", "CJK") > 0.8
        assert min(share("german", "LATIN"), share("spanish", "LATIN")) > 0.999  # ordinals are not

    def test_chats_and_tools(self, corpus: Corpus) -> None:
        chats = [d for d in corpus.documents if d.domain == "chat"]
        assert all(d.messages and d.messages[-1].role == "assistant" for d in chats)
        assert sum(d.messages[0].role == "system" for d in chats) >= 3
        tools = [d for d in corpus.documents if d.domain == "tools"]
        offered = [d for d in tools if d.tools]
        assert len(offered) >= 10 and sum(not d.messages for d in tools) >= 20
        for document in offered:
            names = {tool["function"]["name"] for tool in json.loads(document.tools)}
            calls = [c for m in document.messages for c in m.wire().get("tool_calls", [])]
            answers = [m.wire()["tool_call_id"] for m in document.messages if m.role == "tool"]
            assert {call["function"]["name"] for call in calls} <= names, document.name
            assert [call["id"] for call in calls] == answers, document.name
            assert all(json.loads(m.content) for m in document.messages if m.role == "tool"), document.name

    def test_json_documents_are_json(self, corpus: Corpus) -> None:
        for document in corpus.documents:
            if document.domain == "tools" and not document.messages:
                lines = [document.text] if document.text.startswith("{\n") else document.text.splitlines()
                assert all(json.loads(line) for line in lines), document.name


class TestLicences:
    def test_every_source_is_named_with_its_licence(self, rows: list[dict[str, object]]) -> None:
        page = (shipped.FOLDER / "LICENSES.md").read_text(encoding="utf-8")
        table = {
            line.split("|")[1].strip().strip("`"): line.split("|")[3].strip()
            for line in page.splitlines()
            if line.startswith("| `") and line.count("|") == 5
        }
        del table["source"]
        assert set(table) == {str(row["source"]) for row in rows}
        assert set(table.values()) <= {"Apache-2.0", "MIT", "BSD-2-Clause", "BSD-3-Clause", "public domain"}
        assert "Permission is hereby granted" in page and "Redistribution and use in source and binary forms" in page

    def test_is_part_of_the_package(self) -> None:
        assert '"corpora/data/*"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


class TestLoader:
    def test_needs_neither_torch_nor_a_network(self) -> None:
        code = (
            "import socket, sys\n"
            "def refuse(*a, **k): raise AssertionError('a connection')\n"
            "socket.socket.connect = refuse\n"
            "from evalgate.corpora import load_corpus\n"
            "assert len(load_corpus(None).documents) == 324\n"
            "assert not {'torch', 'transformers', 'pandas', 'pyarrow', 'datasets'} & set(sys.modules)\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)

    @pytest.mark.parametrize("damage", ["missing", "cut", "changed", "no manifest"])
    def test_a_damaged_installation_is_named(
        self, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        raw = shipped.manifest(1).path.read_bytes()
        manifest = (shipped.FOLDER / "v1.json").read_text(encoding="utf-8")
        monkeypatch.setattr(shipped, "FOLDER", tmp_path)
        if damage != "no manifest":
            (tmp_path / "v1.json").write_text(manifest, encoding="utf-8")
        if damage != "missing":
            changed = gzip.compress(gzip.decompress(raw).replace(b"harbour", b"airport"))
            (tmp_path / "v1.jsonl.gz").write_bytes({"cut": raw[:9000], "changed": changed}.get(damage, raw))
        with pytest.raises(InputError, match="missing or damaged: install evalgate again"):
            load_corpus(None)

    def test_named_corpora_win_over_paths(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "evalgate").mkdir()
        (tmp_path / "evalgate" / "a.txt").write_text("mine")
        assert load_corpus("evalgate").name == "evalgate corpus v1"
        assert load_corpus("./evalgate").documents[0].text == "mine"

    def test_options_that_do_not_apply_are_refused(self) -> None:
        for name in (None, *NAMED):
            for option in ("split", "text_column", "split_on"):
                with pytest.raises(UsageError, match=r"does not apply to the corpus (evalgate|python)"):
                    load_corpus(name, **{option: "x"})

    def test_the_former_name_says_where_its_texts_are(self) -> None:
        with pytest.raises(UsageError, match="--data python"):
            load_corpus("builtin")

    def test_the_default_limit_is_that_of_every_corpus_that_comes_along(self) -> None:
        for data in (None, *NAMED):
            assert is_named(data)
            assert limit_of(RunRequest.of("ppl", None, ["m"], data=data)) == NAMED_LIMIT
            assert limit_of(RunRequest.of("ppl", None, ["m"], data=data, limit=3)) == 3
        assert limit_of(RunRequest.of("ppl", None, ["m"], data="texts/")) is None


class TestPlainText:
    def test_turns_tools_and_calls(self) -> None:
        tools = read_tools([{"type": "function", "function": {"name": "add", "parameters": {}}}])
        call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
        chat = read_chat(
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "1 + 2?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "3", "tool_call_id": "c1"},
                {"role": "assistant", "content": "Three."},
            ],
            "messages",
        )
        assert plain_text(chat, tools) == (
            f"Tools: {tools}\n\nSystem: Be brief.\n\nUser: 1 + 2?\n\n"
            'Assistant: {"arguments":{"a":1,"b":2},"name":"add"}\n\nTool: 3\n\nAssistant: Three.\n'
        )

    def test_llama_cpp_joins_the_plain_texts(self, corpus: Corpus) -> None:
        """That preset refuses chats; ours have a plain text, which is joined, and the result says so."""
        documents = list(islice(corpus.documents, 18))
        asked: list[Document] = []

        def tokenize(given: list[Document]) -> list[TokenizedDocument]:
            asked.extend(given)
            return [part for document in given for part in words(document)]

        chosen = policy("llama.cpp", context=64)
        found = cut(tokenized(documents, chosen, tokenize), chosen)
        assert not any(document.messages or document.tools for document in asked)
        assert {w.domain for w in found.windows} == set(DOMAINS)
        chats = sum(bool(d.messages) for d in documents)
        assert found.notes == (
            f"{chats} chats are shown as plain text and scored whole: the llama.cpp preset joins plain texts",
        )

    def test_every_prefix_of_windows_is_balanced(self, corpus: Corpus) -> None:
        """With a limit, every document's first window comes before any document's second one."""
        documents = [part for document in corpus.documents for part in words(document)]
        for limit in (9, 10, 64, 324):
            windows = cut(documents, WindowPolicy("disjoint", 128, 128), limit=limit).windows
            counts = Counter(window.domain for window in windows)
            assert len(windows) == limit and max(counts.values()) - min(counts.values()) <= 1
