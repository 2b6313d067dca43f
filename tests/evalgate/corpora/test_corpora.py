"""Corpora: every kind of input, what is skipped and why, names, domains, the hash."""

from __future__ import annotations

import csv
import errno
import heapq as heapq_module
import io
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from evalgate.core import Document, Message, Skipped
from evalgate.corpora import Corpus, digest, load_corpus
from evalgate.corpora.corpus import build
from evalgate.errors import InputError, UsageError
from evalgate.measure.recordings import is_recorded, open_recorded
from evalgate.specs import parse
from serve.errors import LoadFailed
from serve.models.source import resolve


def texts(corpus: Corpus) -> dict[str, str]:
    return {d.name: d.text for d in corpus.documents}


def reasons(corpus: Corpus) -> dict[str, str]:
    return {s.name: s.reason for s in corpus.skipped}


def write_jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class TestPython:
    def test_two_domains_interleaved(self) -> None:
        corpus = load_corpus("python")
        assert corpus.name == f"python-{platform.python_version()}"
        assert [d.domain for d in corpus.documents[:6]] == ["prose", "code"] * 3
        assert {s.reason for s in corpus.skipped} <= {"the same text as prose/else, which counts once"}
        names = [d.name for d in corpus.documents]
        assert len(set(names)) == len(names)
        assert {n.split("/")[0] for n in names} == {"prose", "code"}
        sizes = {x: sum(len(d.text) for d in corpus.documents if d.domain == x) for x in ("prose", "code")}
        assert min(sizes.values()) > 300_000

    def test_is_repeatable_and_whole(self) -> None:
        corpus = load_corpus("python")
        assert corpus == load_corpus("python")
        heapq = next(d for d in corpus.documents if d.name == "code/heapq")
        assert heapq.text == Path(str(heapq_module.__file__)).read_text(encoding="utf-8")

    def test_missing_sources_are_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("evalgate.corpora.python.CODE_MODULES", "heapq sys nowhere_to_be_found")
        monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
        corpus = load_corpus("python")
        assert [d.name for d in corpus.documents] == ["code/heapq"]
        assert set(reasons(corpus)) == {"prose", "code/sys", "code/nowhere_to_be_found"}


class TestTextFiles:
    def test_bom_is_dropped_and_crlf_kept(self, tmp_path: Path) -> None:
        path = tmp_path / "novel.txt"
        path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
        corpus = load_corpus(path)
        assert corpus.documents == (Document("novel.txt", "novel", text="one\r\ntwo\n"),)
        assert corpus.name == str(path)

    def test_unknown_suffix_is_text(self, tmp_path: Path) -> None:
        path = tmp_path / "notes.rst"
        path.write_text("hello")
        assert texts(load_corpus(str(path))) == {"notes.rst": "hello"}

    @pytest.mark.parametrize(
        ("raw", "reason"),
        [
            (b"", "empty"),
            (b"\xef\xbb\xbf", "empty"),
            (b" \n\t", "only whitespace"),
            (b"a\0b", "binary"),
            (b"caf\xe9", "not UTF-8 .byte 3"),
            ("wide".encode("utf-16"), "binary"),
        ],
    )
    def test_unusable(self, tmp_path: Path, raw: bytes, reason: str) -> None:
        path = tmp_path / "a.txt"
        path.write_bytes(raw)
        with pytest.raises(InputError, match=f"no usable document .a.txt: {reason}.*: give UTF-8 text with --data"):
            load_corpus(path)

    def test_min_bytes_counts_utf8(self, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        path.write_text("äö", encoding="utf-8")
        assert load_corpus(path, min_bytes=4).documents
        with pytest.raises(InputError, match="shorter than 5 bytes"):
            load_corpus(path, min_bytes=5)
        with pytest.raises(UsageError, match="min_bytes is 0"):
            load_corpus(path, min_bytes=0)

    def test_stdin(self) -> None:
        corpus = load_corpus("-", stdin=io.BytesIO(b"\xef\xbb\xbfhi\r\n"))
        assert corpus.documents == (Document("stdin", "stdin", text="hi\r\n"),)
        with pytest.raises(InputError, match="stdin: empty"):
            load_corpus("-", stdin=io.BytesIO(b""))


class TestFolder:
    def test_domains_order_hidden_and_binary(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        for name, raw in {
            "b.txt": b"b",
            "a.md": b"a",
            "law/deep/x.txt": b"x",
            "law/rows.jsonl": b'{"text": "r1"}\n{"text": "r2", "domain": "own", "id": "z"}\n',
            "code/logo.png": b"\x89PNG\0\0",
            "code/m.py": b"pass",
            ".hidden/x.txt": b"no",
            ".secret": b"no",
        }.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(raw)
        corpus = load_corpus(root)
        assert [(d.name, d.domain) for d in corpus.documents] == [
            ("a.md", "root"),
            ("b.txt", "root"),
            ("code/m.py", "code"),
            ("law/deep/x.txt", "law"),
            ("law/rows.jsonl:1", "law"),
            ("z", "own"),
        ]
        assert corpus.skipped == (Skipped("code/logo.png", "binary (NUL byte)"),)

    def test_links_to_nothing_and_pipes_are_named_and_never_waited_for(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("a")
        (tmp_path / "link.txt").symlink_to(tmp_path / "none")
        (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
        (tmp_path / "folder").symlink_to(tmp_path)
        os.mkfifo(tmp_path / "pipe.csv")
        corpus = load_corpus(tmp_path)
        assert [d.name for d in corpus.documents] == ["a.txt"]
        assert corpus.skipped == (
            Skipped("folder", "a link to a folder, which is not followed"),
            Skipped("link.txt", "a link to nothing"),
            Skipped("loop.jsonl", "a link to nothing"),
            Skipped("pipe.csv", "no regular file (a pipe, socket or device)"),
        )

    def test_unreadable_places_are_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "a.txt").write_text("a")
        (tmp_path / "b.txt").write_text("b")
        read = Path.open

        def refuse(path: Path, *mode: str) -> IO[Any]:
            if path.name == "b.txt":
                raise PermissionError(13, "Permission denied", str(path))
            return read(path, *mode)

        monkeypatch.setattr(Path, "open", refuse)
        corpus = load_corpus(tmp_path)
        assert texts(corpus) == {"a.txt": "a"}
        assert reasons(corpus) == {"b.txt": "cannot be read (Permission denied)"}

    def test_empty(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="holds no document at all"):
            load_corpus(tmp_path)

    def test_text_column_applies_to_its_tables_only(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("a")
        with pytest.raises(UsageError, match="--text-column does not apply"):
            load_corpus(tmp_path, text_column="body")
        (tmp_path / "t.csv").write_text("body\nhello\n")
        assert texts(load_corpus(tmp_path, text_column="body")) == {"a.txt": "a", "t.csv:1": "hello"}


class TestJsonLines:
    def test_rows(self, tmp_path: Path) -> None:
        chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
        rows: list[object] = [
            {"text": "one", "id": "x", "name": "ignored"},
            {"text": "two", "name": "y", "messages": None},
            {"messages": chat, "domain": "talk", "id": 7},
            {"text": "four", "id": "x", "domain": ""},
        ]
        corpus = load_corpus(write_jsonl(tmp_path / "set.jsonl", rows))
        assert corpus.documents == (
            Document("x", "set", text="one"),
            Document("y", "set", text="two"),
            Document("7", "talk", messages=(Message("user", "q"), Message("assistant", "a"))),
            Document("x#2", "set", text="four"),
        )

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            (b'{"text": ', "not JSON"),
            (b'{"text": "\xff"}', "not UTF-8"),
            (b'{"text": "\\ud800"}', "not JSON"),
            (b'["text"]', "list, not an object"),
            (b"{}", "neither text nor messages"),
            (b'{"text": null}', "neither text nor messages"),
            (b'{"text": "a", "messages": []}', "both text and messages"),
            (b'{"messages": [], "conversations": []}', "both messages and conversations"),
            (b'{"text": 3}', "text is int, not a string"),
            (b'{"text": ""}', "empty"),
            (b'{"text": " \\n"}', "only whitespace"),
            (b'{"text": "a\\u0000"}', "binary (NUL byte)"),
            (b'{"text": "a", "domain": 3}', "domain is int, not a string"),
            (b'{"messages": []}', "messages is empty"),
            (b'{"messages": "hi"}', "messages is str, not a list"),
            (b'{"messages": ["hi"]}', "message 1: str, not an object"),
            (b'{"messages": [{"role": "assistant", "content": " "}]}', "only whitespace"),
            (
                b'{"messages": [{"role": "user", "content": "a"}]}',
                "no message is the assistant's, and only the assistant's are scored",
            ),
            (
                b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}',
                "empty: the assistant says nothing",
            ),
            (
                b'{"messages": [{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}]}',
                "message 2: role 'bot' is not one of system, developer, user, assistant, tool",
            ),
            (b'{"messages": [{"role": ["user"], "content": "a"}]}', None),
            (b'{"messages": [{"role": "user", "content": null}]}', "message 1: content is NoneType, not a string"),
            (
                b'{"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]}',
                "message 1: function_call is not supported",
            ),
            (
                b'{"messages": [{"role": "assistant", "content": "", "tool_calls": "f"}]}',
                "message 1: tool_calls is not a list of objects",
            ),
            (
                b'{"messages": [{"role": "assistant", "content": [{"type": "image_url", "image_url": "x"}]}]}',
                "message 1: part 1 is 'image_url', and only text parts can be shown",
            ),
            (
                b'{"messages": [{"role": "assistant", "content": "a", "name": 3}]}',
                "message 1: name is int, not a string",
            ),
            (
                b'{"messages": [{"role": "assistant", "content": "a"}], "tools": "["}',
                "tools is text that is not JSON",
            ),
            (b'{"messages": [{"role": "assistant", "content": "a"}], "tools": [1]}', "tools is not a list of objects"),
            (
                b'{"conversations": [{"from": "dog", "value": "a"}]}',
                "message 1: from 'dog' is not one of system, human, user, gpt, chatgpt, assistant, tool, "
                "function_response, observation",
            ),
            (b'{"conversations": [{"from": "gpt"}]}', "message 1: value is NoneType, not a string"),
        ],
    )
    def test_unusable_rows_are_named(self, tmp_path: Path, line: bytes, reason: str | None) -> None:
        path = tmp_path / "s.jsonl"
        path.write_bytes(b'\xef\xbb\xbf{"text": "good"}\r\n\r\n' + line + b"\n")
        corpus = load_corpus(path)
        assert texts(corpus) == {"s.jsonl:1": "good"}
        assert list(reasons(corpus)) == ["s.jsonl:3"]
        assert reason is None or corpus.skipped[0].reason == reason

    def test_text_column(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "s.jsonl", [{"body": "b", "text": "t", "messages": []}, {"text": "t"}])
        corpus = load_corpus(path, text_column="body")
        assert texts(corpus) == {"s.jsonl:1": "b"}
        assert reasons(corpus) == {"s.jsonl:2": "no 'body'"}
        names = write_jsonl(tmp_path / "n.jsonl", [{"name": "the text"}])
        assert texts(load_corpus(names, text_column="name")) == {"n.jsonl:1": "the text"}

    def test_no_usable_row_names_some_reasons(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "s.jsonl", [{}] * 8)
        with pytest.raises(InputError, match=r"s\.jsonl:5: neither text nor messages, and 3 more"):
            load_corpus(path)


class TestCsv:
    def test_quotes_crlf_and_long_fields(self, tmp_path: Path) -> None:
        long = "x" * 200_000
        path = tmp_path / "t.csv"
        path.write_bytes(b'\xef\xbb\xbftext,domain,id\r\n"a ""q""\r\nb",d,i\r\n' + long.encode() + b",,\r\n")
        before = csv.field_size_limit()
        corpus = load_corpus(path)
        assert csv.field_size_limit() == before
        assert corpus.documents == (Document("i", "d", text='a "q"\r\nb'), Document("t.csv:2", "t", text=long))

    def test_tsv(self, tmp_path: Path) -> None:
        path = tmp_path / "t.tsv"
        path.write_text("n\tbody\n1\ta, b\n")
        assert texts(load_corpus(path, text_column="body")) == {"t.tsv:1": "a, b"}

    def test_quotes_in_tsv_are_characters(self, tmp_path: Path) -> None:
        path = tmp_path / "q.tsv"
        path.write_text('id\ttext\n1\t"Hello, she said\n2\tplain row\n3\ta "quoted" row\n4\tone\ttoo many\n')
        corpus = load_corpus(path)
        assert texts(corpus) == {"1": '"Hello, she said', "2": "plain row", "3": 'a "quoted" row'}
        assert reasons(corpus) == {"q.tsv:4": "malformed row (3 fields, the header has 2), line 5"}

    def test_lost_lines_are_counted(self, tmp_path: Path) -> None:
        path = tmp_path / "t.csv"
        path.write_text('text\nfirst\n"open\nsecond\nthird\n')
        corpus = load_corpus(path)
        assert texts(corpus) == {"t.csv:1": "first"}
        assert reasons(corpus)["t.csv:2"].endswith("), lines 3 to 5, 3 in all")

    def test_malformed_rows_are_named(self, tmp_path: Path) -> None:
        path = tmp_path / "t.csv"
        path.write_bytes(b'text,n\n"a"b,1\ngood,2\nx,1,2\ncaf\xe9,3\nnul\0,4\n,5\n\n"open\n')
        corpus = load_corpus(path)
        assert texts(corpus) == {"t.csv:2": "good"}
        found = reasons(corpus)
        assert list(found) == [f"t.csv:{n}" for n in (1, 3, 4, 5, 6, 7)]
        assert found["t.csv:1"].startswith("malformed row (")
        assert found["t.csv:3"] == "malformed row (3 fields, the header has 2), line 4"
        assert found["t.csv:4"] == "not UTF-8"
        assert found["t.csv:5"] == "binary (NUL byte)"
        assert found["t.csv:6"] == "empty"
        assert found["t.csv:7"].startswith("malformed row (")

    def test_columns(self, tmp_path: Path) -> None:
        path = tmp_path / "t.csv"
        path.write_text("a,b,b\n1,2,3\n")
        with pytest.raises(InputError, match=r"no column 'text' \(columns: a, b, b\); name one with --text-column"):
            load_corpus(path)
        with pytest.raises(InputError, match="more than once"):
            load_corpus(path, text_column="b")
        path.write_text("")
        with pytest.raises(InputError, match=r"t\.csv: empty"):
            load_corpus(path)


class TestParquet:
    def test_rows_over_batches(self, tmp_path: Path) -> None:
        path = tmp_path / "p.parquet"
        parquet.write_table(pa.table({"text": [f"t{i}" for i in range(600)], "junk": [0] * 600}), path)
        corpus = load_corpus(path)
        assert texts(corpus) == {f"p.parquet:{i + 1}": f"t{i}" for i in range(600)}

    def test_messages_nulls_and_bad_utf8(self, tmp_path: Path) -> None:
        turn = {"role": "assistant", "content": "q"}
        bad = pa.array([b"a", None, b"\xff"], pa.binary()).view(pa.string())
        path = tmp_path / "p.parquet"
        parquet.write_table(pa.table({"text": bad, "messages": [None, [turn], None]}), path)
        corpus = load_corpus(path)
        assert corpus.documents == (
            Document("p.parquet:1", "p", text="a"),
            Document("p.parquet:2", "p", messages=(Message("assistant", "q"),)),
        )
        assert reasons(corpus) == {"p.parquet:3": "not UTF-8"}

    def test_columns_and_broken_files(self, tmp_path: Path) -> None:
        path = tmp_path / "p.parquet"
        parquet.write_table(pa.table({"body": ["b"], "n": [1]}), path)
        assert texts(load_corpus(path, text_column="body")) == {"p.parquet:1": "b"}
        with pytest.raises(InputError, match=r"no column 'text' \(columns: body, n\)"):
            load_corpus(path)
        with pytest.raises(InputError, match=r"p\.parquet:1: n is int, not a string"):
            load_corpus(path, text_column="n")
        path.write_bytes(b"not parquet at all")
        with pytest.raises(InputError, match="not a readable Parquet file"):
            load_corpus(path)


class TestUsage:
    def test_missing_paths(self, tmp_path: Path) -> None:
        for data in (tmp_path / "none.txt", "none.txt", "some/where.jsonl", "./nope", "a/b/c", "x" * 5000 + "/y.txt"):
            with pytest.raises(InputError, match="there is no file or folder"):
                load_corpus(data)
        with pytest.raises(UsageError, match="--data is empty"):
            load_corpus("")

    def test_options_that_do_not_apply(self, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        path.write_text("a")
        for data in (None, "-", path, tmp_path):
            with pytest.raises(UsageError, match="--split does not apply"):
                load_corpus(data, split="test")
        (tmp_path / "t.csv").write_text("text\na\n")
        for data in (None, tmp_path / "t.csv"):
            with pytest.raises(UsageError, match="--split-on does not apply"):
                load_corpus(data, split_on="^#")
        (tmp_path / "t.csv").unlink()
        for wrong, said in (("(", "is not a regular expression"), ("x*", "matches an empty line")):
            with pytest.raises(UsageError, match=said):
                load_corpus(path, split_on=wrong)
        for data in (None, "-", path, tmp_path):
            with pytest.raises(UsageError, match="--text-column does not apply"):
                load_corpus(data, text_column="body")

    def test_importing_is_light(self) -> None:
        code = (
            "import sys, evalgate.corpora, evalgate.windows; "
            "print(sorted({'pyarrow', 'pandas', 'datasets', 'xxhash', 'orjson', 'numpy'} & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"


class TestCopies:
    def test_a_copy_is_named_and_counts_once(self, tmp_path: Path) -> None:
        rows = [{"text": "hello", "id": f"n{i}", "domain": f"d{i % 2}"} for i in range(8)]
        corpus = load_corpus(write_jsonl(tmp_path / "dup.jsonl", [*rows, {"text": "hello "}]))
        assert [d.name for d in corpus.documents] == ["n0", "dup.jsonl:9"]
        assert reasons(corpus) == {f"n{i}": "the same text as n0, which counts once" for i in range(1, 8)}

    def test_chats_with_other_tools_are_no_copies(self, tmp_path: Path) -> None:
        chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
        rows: list[object] = [{"messages": chat}, {"messages": chat, "tools": [{"name": "f"}]}, {"messages": chat}]
        corpus = load_corpus(write_jsonl(tmp_path / "c.jsonl", rows))
        assert [d.name for d in corpus.documents] == ["c.jsonl:1", "c.jsonl:2"]
        assert list(reasons(corpus)) == ["c.jsonl:3"]


class TestHash:
    def test_is_pinned(self) -> None:
        """Changing the framing breaks every stored hash, so it must not happen by accident."""
        documents = [Document("n", "d", text="t"), Document("m", "d", messages=(Message("user", "hi"),))]
        assert digest(documents) == digest(list(documents))
        from xxhash import xxh3_128

        def framed(*texts: str) -> bytes:
            return b"".join(len(t.encode()).to_bytes(8, "little") + t.encode() for t in texts)

        zero, one = bytes(8), (1).to_bytes(8, "little")
        raw = framed("n", "d", "t") + zero + framed("m", "d", "") + one + framed("user", "hi")
        assert digest(documents) == xxh3_128(raw).hexdigest()
        assert len(digest([])) == 32

    def test_every_field_and_the_order_count(self) -> None:
        a, b = Document("a", "d", text="x"), Document("b", "d", text="y")
        variants = [
            [a, b],
            [b, a],
            [a],
            [Document("a", "e", text="x"), b],
            [Document("ad", "", text="x"), b],
            [Document("a", "d", text="xy"), Document("b", "d")],
            [Document("a", "d", messages=(Message("user", "x"),)), b],
            [Document("a", "d", messages=(Message("user", ""), Message("user", "x"))), b],
            [Document("a", "d", messages=(Message("user", "x", "{}"),)), b],
            [Document("a", "d", messages=(Message("user", "x"),), tools="[]"), b],
            [Document("a", "d", text="x", whole="w"), b],
        ]
        assert len({digest(v) for v in variants}) == len(variants)

    @given(st.lists(st.text(st.characters(codec="utf-8"), max_size=3), min_size=1, max_size=12))
    def test_names_become_unique_in_order(self, names: list[str]) -> None:
        corpus = build("c", [Document(n, "d", text=f"t{i}") for i, n in enumerate([*names, "a", "a#2", "a"])])
        found = [d.name for d in corpus.documents]
        assert len(set(found)) == len(found)
        assert [d.text for d in corpus.documents] == [f"t{i}" for i in range(len(found))]
        assert all(new.startswith(old) for new, old in zip(found, names, strict=False))


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that may be neither listed nor searched, for root too."""
    folder = tmp_path / "texts" / "locked"
    folder.mkdir(parents=True)
    (tmp_path / "texts" / "open.txt").write_text("hello")

    def refusing(real: Callable[..., Any]) -> Callable[..., Any]:
        def asked(path: Any = ".", *args: Any, **named: Any) -> Any:
            text = os.fspath(path) if not isinstance(path, int) else ""
            if text.startswith(f"{folder}{os.sep}") or (text == str(folder) and real is scandir):
                raise PermissionError(errno.EACCES, "Permission denied", text)
            return real(path, *args, **named)

        return asked

    stat, scandir = os.stat, os.scandir
    monkeypatch.setattr(os, "stat", refusing(stat))
    monkeypatch.setattr(os, "scandir", refusing(scandir))
    return folder


def test_what_may_not_be_read_is_named(locked: Path) -> None:
    assert texts(corpus := load_corpus(locked.parent)) == {"open.txt": "hello"}
    assert list(reasons(corpus).values()) == ["cannot be read (Permission denied)"]
    with pytest.raises(InputError, match=r"no usable document .*cannot be read .Permission denied"):
        load_corpus(locked)
    with pytest.raises(InputError, match=r"cannot read .*a.txt: Permission denied"):
        load_corpus(locked / "a.txt")
    assert not is_recorded(parse(str(locked / "m.gguf")))
    with pytest.raises(InputError, match=r"cannot read .*r.trace: Permission denied"):
        open_recorded(parse(str(locked / "r.trace")))
    with pytest.raises(LoadFailed, match=r"m.gguf' cannot be read .Permission denied"):
        resolve(str(locked / "m.gguf"))
