"""Files inside something else: what is read, and what is refused by name instead of being read as prose."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict

from evalgate.core import Message
from evalgate.corpora import Corpus, load_corpus
from evalgate.errors import InputError, UsageError

ROWS = [{"text": "alpha beta"}, {"text": "gamma delta"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def texts(corpus: Corpus) -> list[str]:
    return [d.text for d in corpus.documents]


def reasons(corpus: Corpus) -> dict[str, str]:
    return {s.name: s.reason for s in corpus.skipped}


def zstd(raw: bytes) -> bytes:
    return pa.Codec("zstd").compress(raw, asbytes=True)


class TestJson:
    @pytest.mark.parametrize(
        "raw",
        [json.dumps(ROWS).encode(), json.dumps(ROWS, indent=2).encode(), LINES, b"\xef\xbb\xbf" + LINES, b"\n" + LINES],
    )
    def test_arrays_and_lines_are_rows(self, tmp_path: Path, raw: bytes) -> None:
        (tmp_path / "rows.json").write_bytes(raw)
        corpus = load_corpus(tmp_path / "rows.json")
        assert texts(corpus) == ["alpha beta", "gamma delta"]
        assert {d.domain for d in corpus.documents} == {"rows"}

    def test_one_object_may_be_a_row(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_text('{"text": "alone"}')
        assert texts(load_corpus(tmp_path)) == ["alone"]

    @pytest.mark.parametrize(
        ("raw", "reason"),
        [
            (b'{"data": [1, 2]}', "a JSON object that is no row (neither text nor messages)"),
            (b"3", "JSON that holds int and no rows"),
            (b"[1, 2]", "int, not an object"),
            (b'{"text": ', "not JSON"),
            (b"some prose\nin lines", "not JSON"),
            (b"\xff", "not UTF-8"),
        ],
    )
    def test_syntax_is_never_prose(self, tmp_path: Path, raw: bytes, reason: str) -> None:
        (tmp_path / "a.json").write_bytes(raw)
        (tmp_path / "b.txt").write_text("text")
        corpus = load_corpus(tmp_path)
        assert texts(corpus) == ["text"]
        assert all(found.startswith(reason) for found in reasons(corpus).values())
        assert reasons(corpus)

    def test_nan_in_another_field_loses_no_row(self, tmp_path: Path) -> None:
        path = tmp_path / "nan.jsonl"
        path.write_text('{"text":"alpha","score":NaN}\n{"text":"b","score":-Infinity}\n{"text":NaN}\n{"a":NaN\n')
        corpus = load_corpus(path)
        assert texts(corpus) == ["alpha", "b"]
        assert reasons(corpus) == {"nan.jsonl:3": "text is float, not a string", "nan.jsonl:4": "not JSON"}


class TestCompressed:
    @pytest.mark.parametrize(
        ("suffix", "pack"), [(".gz", gzip.compress), (".zst", zstd), (".bz2", bz2.compress), (".xz", lzma.compress)]
    )
    def test_every_kind_inside(self, tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]) -> None:
        for name, raw in {
            "a.txt": b"a text\n",
            "b.jsonl": LINES,
            "c.json": b'[{"text": "epsilon"}]',
            "d.csv": b'text\n"x, y"\n',
            "e.tsv": b'text\n"q\n',
        }.items():
            (tmp_path / f"{name}{suffix}").write_bytes(pack(raw))
        corpus = load_corpus(tmp_path)
        assert texts(corpus) == ["a text\n", "alpha beta", "gamma delta", "epsilon", "x, y", '"q']
        alone = load_corpus(tmp_path / f"b.jsonl{suffix}")
        assert [(d.name, d.domain) for d in alone.documents] == [(f"b.jsonl{suffix}:{n}", "b") for n in (1, 2)]

    @pytest.mark.parametrize(
        ("suffix", "pack"), [(".gz", gzip.compress), (".zst", zstd), (".bz2", bz2.compress), (".xz", lzma.compress)]
    )
    def test_damage_is_named(self, tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]) -> None:
        whole = pack(b"".join(b'{"text": "row %d"}\n' % n for n in range(5000)))
        (tmp_path / f"cut.jsonl{suffix}").write_bytes(whole[: len(whole) // 2])
        (tmp_path / f"not.txt{suffix}").write_bytes(b"never compressed")
        (tmp_path / "good.txt").write_text("good")
        found = reasons(load_corpus(tmp_path))
        assert set(found) == {f"cut.jsonl{suffix}", f"not.txt{suffix}"}
        assert all(reason.startswith(f"damaged {suffix} data (") for reason in found.values())

    def test_archives_and_pointers_are_refused_by_name(self, tmp_path: Path) -> None:
        for name in ("a.zip", "b.tar", "c.tar.gz", "d.tgz", "e.7z", "f.parquet.gz"):
            (tmp_path / name).write_bytes(b"anything")
        (tmp_path / "g.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
        with pytest.raises(InputError, match=r"a\.zip: a \.zip archive, which is not read: unpack it first"):
            load_corpus(tmp_path / "a.zip")
        (tmp_path / "h.txt").write_text("h")
        found = reasons(load_corpus(tmp_path))
        assert set(found) == {"a.zip", "b.tar", "c.tar.gz", "d.tgz", "e.7z", "f.parquet.gz", "g.parquet"}
        assert found["g.parquet"].startswith("a Git LFS pointer")


class TestDataSetFolders:
    def test_saved_data_set(self, tmp_path: Path) -> None:
        Dataset.from_list([{**row, "n": i} for i, row in enumerate(ROWS)]).save_to_disk(str(tmp_path / "saved"))
        corpus = load_corpus(tmp_path / "saved")
        assert texts(corpus) == ["alpha beta", "gamma delta"]
        assert [(d.name, d.domain) for d in corpus.documents] == [("saved:1", "saved"), ("saved:2", "saved")]
        assert texts(load_corpus(tmp_path)) == ["alpha beta", "gamma delta"]
        with pytest.raises(InputError, match="without splits"):
            load_corpus(tmp_path / "saved", split="test")
        with pytest.raises(InputError, match="no column 'body'"):
            load_corpus(tmp_path / "saved", text_column="body")

    def test_splits(self, tmp_path: Path) -> None:
        both = DatasetDict({"train": Dataset.from_list(ROWS[:1]), "test": Dataset.from_list(ROWS[1:])})
        both.save_to_disk(str(tmp_path / "two"))
        assert texts(load_corpus(tmp_path / "two")) == ["gamma delta"]
        assert texts(load_corpus(tmp_path / "two", split="train")) == ["alpha beta"]
        with pytest.raises(InputError, match="has no split 'dev'; choose one with --split: train, test"):
            load_corpus(tmp_path / "two", split="dev")

    def test_arrow_files(self, tmp_path: Path) -> None:
        table = pa.table({"text": ["one", "two"], "junk": [1, 2]})
        with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        table = pa.table({"text": ["three"], "junk": [3]})
        with pa.OSFile(str(tmp_path / "b.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        (tmp_path / "c.arrow").write_bytes(b"no arrow at all")
        corpus = load_corpus(tmp_path)
        assert texts(corpus) == ["one", "two", "three"]
        assert list(reasons(corpus)) == ["c.arrow"]

    def test_cloned_repository_is_its_rows(self, tmp_path: Path) -> None:
        for name, raw in {
            "README.md": b"---\nconfigs: []\n---\n# A data set\n",
            "LICENSE": b"words",
            "dataset_infos.json": b"{}",
            "data/test.jsonl": LINES,
        }.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(raw)
        corpus = load_corpus(tmp_path)
        assert texts(corpus) == ["alpha beta", "gamma delta"]
        described = {"README.md", "LICENSE", "dataset_infos.json"}
        assert reasons(corpus) == dict.fromkeys(described, "describes the rows beside it")

    def test_a_readme_without_rows_is_text(self, tmp_path: Path) -> None:
        (tmp_path / "README.md").write_text("words")
        assert texts(load_corpus(tmp_path)) == ["words"]
        with pytest.raises(UsageError, match="--split does not apply"):
            load_corpus(tmp_path, split="test")


class TestChats:
    def test_tool_calls_parts_and_developers_are_kept(self, tmp_path: Path) -> None:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        rows = [
            {
                "messages": [
                    {"role": "developer", "content": "be brief", "weight": 0},
                    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                    {"role": "assistant", "content": None, "tool_calls": [call]},
                    {"role": "tool", "content": "42", "tool_call_id": "c"},
                    {"role": "assistant", "content": "it is 42", "name": None},
                ],
                "tools": [{"type": "function", "function": {"name": "f", "description": None}}],
            },
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        ]
        path = tmp_path / "chats.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        first, second = load_corpus(path).documents
        assert [message.wire() for message in first.messages] == [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "42", "tool_call_id": "c"},
            {"role": "assistant", "content": "it is 42"},
        ]
        assert first.messages[1].content == "ab"
        assert json.loads(first.tools) == [{"type": "function", "function": {"name": "f"}}]
        assert second.messages == (Message("user", "q"), Message("assistant", "a"))

    def test_parquet_and_json_lines_give_one_corpus(self, tmp_path: Path) -> None:
        rows = [
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "name": "n"}]},
            {"messages": [{"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}]},
        ]
        path = tmp_path / "chats.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        Dataset.from_list(rows).to_parquet(str(tmp_path / "chats.parquet"))
        lines, table = load_corpus(path), load_corpus(tmp_path / "chats.parquet")
        assert [d.messages for d in lines.documents] == [d.messages for d in table.documents]
