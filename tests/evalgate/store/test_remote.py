"""Runs, traces and texts at URLs: whole or not at all, checked as they arrive, refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations as known

from evalgate.corpora import load_corpus
from evalgate.errors import InputError, UsageError
from evalgate.store import remote
from evalgate.store.remote import Url, copied_text, here, is_there, is_url, local_copy, place, publish
from evalgate.store.runs import FORMAT, MANIFEST, SUMMARY, TOKENS, Run, check_target, read_run, write_run
from evalgate.traces import TraceWriter, read_trace, verify
from evalgate.traces.layout import FORMAT as TRACE
from tests.evalgate.sample_run import summary, token_table
from tests.evalgate.trace_samples import meta, record, windows


class Bucket(MemoryFileSystem):
    """An object store in memory with its own objects, in which some may not be read or written, and writes can fail."""

    protocol = ("bucket",)
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    closed: ClassVar[set[str]] = set()  # methods that are not allowed
    broken = ""  # the name of a file whose upload is cut

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("bucket://", "memory://"))

    def cat_file(self, path: str, *given: Any, **more: Any) -> bytes:
        if "read" in self.closed:
            raise PermissionError("Forbidden")
        return super().cat_file(path, *given, **more)

    def pipe_file(self, path: str, value: bytes, *given: Any, **more: Any) -> None:
        if "write" in self.closed:
            raise PermissionError("Access Denied")
        super().pipe_file(path, value, *given, **more)

    def put_file(self, local: str, path: str, *given: Any, **more: Any) -> None:
        if self.broken and path.endswith(self.broken):
            raise TimeoutError("the connection was lost")
        super().put_file(local, path, *given, **more)


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An own cache folder, and object stores that are empty before and after."""
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "cache"))
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    yield
    Bucket.closed, Bucket.broken = set(), ""
    for system in (MemoryFileSystem, Bucket):
        system.store.clear()
        system.pseudo_dirs[:] = [""]


def written(url: str, *, overwrite: bool = False, documents: int = 4) -> Run:
    table = token_table(("demo@int8",), documents=documents)
    where = place(url)
    return write_run(where, manifest={}, table=table, summary=summary(table), overwrite=overwrite)


def stored(url: str) -> dict[str, bytes]:
    files, root = url_to_fs(url)
    return {name.removeprefix(f"{root}/"): files.cat_file(name) for name in files.find(root)}


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("s3://b/run", None),
        ("memory://run/", None),
        ("file:///tmp/a b", "/tmp/a b"),
        ("local:///tmp/ü", "/tmp/ü"),
        ("runs/x", "runs/x"),
        ("C://x", "C:/x"),
    ],
)
def test_what_a_text_names(text: str, path: str | None) -> None:
    found = place(text)
    assert isinstance(found, Url) is (path is None)
    assert found == (text.rstrip("/") if path is None else Path(path))
    assert not is_url(None) and not is_url(Path("s3://b"))


@pytest.mark.parametrize("text", ["s3://", "s3:///", "memory://b/..", "memory://."])
def test_a_url_that_names_nothing_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="names no place"):
        place(text)
    with pytest.raises(UsageError, match="on this machine alone"):
        here("s3://b/run")


@pytest.mark.parametrize("url", ["memory://b/run", "bucket://team/with a space/ünï 日本", "file://{}/run"])
def test_a_run_at_a_url_reads_back(url: str, tmp_path: Path) -> None:
    url = url.format(tmp_path)
    made = written(url)
    found = read_run(place(url))
    assert found.table.equals(made.table) and found.summary == made.summary and found.manifest == made.manifest
    assert str(found.place) == (f"{tmp_path}/run" if url.startswith("file") else url)
    assert set(stored(url)) == {MANIFEST, SUMMARY, TOKENS}
    assert not (tmp_path / "cache" / "outgoing").exists() or not any((tmp_path / "cache" / "outgoing").iterdir())
    assert is_there(place(url)) and not is_there(place(f"{url}x"))


def test_a_run_is_replaced_only_with_overwrite() -> None:
    url = place("memory://b/run")
    written("memory://b/run")
    with pytest.raises(UsageError, match="already holds a run folder: choose another --out, or replace it"):
        written("memory://b/run")
    before = read_run(url)
    written("memory://b/run", overwrite=True, documents=6)
    assert read_run(url).table.num_rows > before.table.num_rows  # the copy of the old one is not believed
    assert set(stored("memory://b/run")) == {MANIFEST, SUMMARY, TOKENS}


def test_a_file_of_the_old_run_does_not_stay() -> None:
    table = token_table(("demo@int8",))
    url = Url("memory://b/run")
    write_run(url, manifest={}, table=table, summary=summary(table), token_texts={1: "a"})
    assert "token_texts.parquet" in stored(url)
    written(url, overwrite=True)
    assert set(stored(url)) == {MANIFEST, SUMMARY, TOKENS}


def test_something_else_is_left_alone() -> None:
    MemoryFileSystem().pipe_file("/b/run/notes.txt", b"mine")
    with pytest.raises(UsageError, match="is not a run folder and is left alone"):
        written("memory://b/run", overwrite=True)
    MemoryFileSystem().pipe_file("/b/file", b"mine")
    with pytest.raises(UsageError, match="is a file: give --out the name of a folder"):
        written("memory://b/file")
    assert stored("memory://b") == {"run/notes.txt": b"mine", "file": b"mine"}


@pytest.mark.parametrize("name", [SUMMARY, TOKENS, MANIFEST])
def test_an_upload_that_fails_leaves_no_run(name: str) -> None:
    written("bucket://b/run")
    Bucket.broken = name
    with pytest.raises(
        InputError, match=r"the connection was lost.*the run is whole in .*: copy it from there"
    ) as said:
        written("bucket://b/run", overwrite=True, documents=6)
    where = Path(said.value.message.partition("whole in ")[2].partition(": copy")[0])
    assert read_run(where).table.num_rows == 180
    assert MANIFEST not in stored("bucket://b/run")
    with pytest.raises(InputError, match=r"has no manifest.json: it was never written whole"):
        read_run(Url("bucket://b/run"))
    Bucket.broken = ""
    with pytest.raises(UsageError, match="holds a part of a run folder, whose copy failed"):
        written("bucket://b/run")
    written("bucket://b/run", overwrite=True)
    assert read_run(Url("bucket://b/run")).table.num_rows == 120


def test_an_upload_that_is_cut_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(self: Bucket, local: str, path: str, *given: Any, **more: Any) -> None:
        MemoryFileSystem.pipe_file(self, path, Path(local).read_bytes()[:-1])

    monkeypatch.setattr(Bucket, "put_file", cut)
    with pytest.raises(InputError, match=r"has .* bytes there and .* here"):
        written("bucket://b/run")
    assert MANIFEST not in stored("bucket://b/run")


def test_permission_denied_is_one_sentence() -> None:
    Bucket.closed = {"write"}
    with pytest.raises(UsageError, match=r"^may not write bucket://b/run \(Access Denied\): check your access to it$"):
        check_target(Url("bucket://b/run"))
    Bucket.closed = set()
    written("bucket://b/run")
    Bucket.closed = {"read"}
    with pytest.raises(InputError, match=r"^may not read bucket://b/run \(Forbidden\)"):
        read_run(Url("bucket://b/run"))


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match=r"^there is no run folder memory://b/none: name a folder"):
        read_run(Url("memory://b/none"))
    with pytest.raises(InputError, match=r"there is nothing at memory://b/none.txt"):
        load_corpus("memory://b/none.txt")


@pytest.mark.parametrize("name", [TOKENS, SUMMARY])
@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b"x" + b[1:]])
def test_a_file_that_was_cut_or_altered_there_is_named(name: str, change: Any) -> None:
    written("memory://b/run")
    files = MemoryFileSystem()
    files.pipe_file(f"/b/run/{name}", change(files.cat_file(f"/b/run/{name}")))
    shutil.rmtree(remote.cache_path() / "remote")
    with pytest.raises(InputError, match=f"^memory://b/run/{name} (has|was altered)"):
        read_run(Url("memory://b/run"))


def test_a_manifest_of_another_thing_or_altered_is_named() -> None:
    files = MemoryFileSystem()
    files.pipe_file("/b/run/manifest.json", b'{"format": "other"}')
    with pytest.raises(InputError, match=r"memory://b/run/manifest.json is not the manifest of a run folder"):
        read_run(Url("memory://b/run"))
    written("memory://b/whole")
    altered = json.loads(files.cat_file("/b/whole/manifest.json"))
    altered["files"][TOKENS]["bytes"] += 1
    files.pipe_file("/b/whole/manifest.json", json.dumps(altered).encode())
    with pytest.raises(InputError, match=r"memory://b/whole/manifest.json was altered"):
        read_run(Url("memory://b/whole"))


def test_a_missing_package_is_said_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(known, "s4", {"class": "s4fs.core.S4", "err": "Install s4fs"})
    monkeypatch.setitem(known, "s5", {"class": "fsspec.implementations.nowhere.S5", "err": "S5 requires s5py"})
    with pytest.raises(UsageError, match=r"^s4:// needs the package s4fs: pip install s4fs$"):
        check_target(Url("s4://b/run"))
    with pytest.raises(UsageError, match=r"^s5:// needs a package that is not installed: S5 requires s5py$"):
        read_run(Url("s5://b/run"))
    with pytest.raises(UsageError, match=r"^there is no protocol nope://: use s3://"):
        load_corpus("nope://b/text.txt")


def test_a_trace_at_a_url_is_read(tmp_path: Path) -> None:
    shown = windows(4, 8, 50)
    folder = tmp_path / "ref.trace"
    writer = TraceWriter(folder, meta(50), windows=shown)
    writer.append(record(shown, vocabulary=50))
    writer.finish()
    publish(folder, Url("memory://b/ref.trace"), TRACE, wrote="")
    found = read_trace("memory://b/ref.trace")
    assert found.windows == read_trace(folder).windows
    assert verify(found.folder) == verify(folder) == []


def test_texts_at_a_url_are_those_of_the_files(tmp_path: Path) -> None:
    files = MemoryFileSystem()
    texts = {"prose/a b.txt": b"Hello there, this is prose.", "code/ü.txt": b"x = 1\n", ".hidden/x.txt": b"no"}
    for name, content in texts.items():
        files.pipe_file(f"/b/texts/{name}", content)
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_bytes(content)
    found, local = load_corpus("memory://b/texts"), load_corpus(str(tmp_path / "texts"))
    assert found.hash == local.hash and found.documents == local.documents and len(found.documents) == 2
    assert found.name == "memory://b/texts"
    assert load_corpus(f"file://{tmp_path}/texts").hash == local.hash
    files.pipe_file("/b/rows.jsonl", b'{"text": "one", "id": "a"}\n{"text": "two"}\n')
    rows = load_corpus("memory://b/rows.jsonl")
    assert [d.text for d in rows.documents] == ["one", "two"] and rows.documents[1].name == "rows.jsonl:2"
    with pytest.raises(UsageError, match=r"--split-on does not apply to the rows of memory://b/rows.jsonl"):
        load_corpus("memory://b/rows.jsonl", split_on="x")


def test_a_text_is_copied_once_and_again_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    files = MemoryFileSystem()
    files.pipe_file("/b/text.txt", b"The first text.")
    first = copied_text(Url("memory://b/text.txt"))
    copies: list[str] = []
    real = remote._copy_file
    monkeypatch.setattr(remote, "_copy_file", lambda *given: (copies.append(given[1]), real(*given))[1])
    assert copied_text(Url("memory://b/text.txt")) == first and copies == []
    files.pipe_file("/b/text.txt", b"Another text.")
    assert copied_text(Url("memory://b/text.txt")).read_bytes() == b"Another text." and len(copies) == 1


def test_an_object_cannot_be_copied_to_another_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = MemoryFileSystem()
    files.pipe_file("/b/texts/a.txt", b"A text.")
    found = files.find("/b/texts", detail=True)
    odd = {**found, "/b/texts/x/../../../y": found["/b/texts/a.txt"]}
    monkeypatch.setattr(MemoryFileSystem, "find", lambda *given, **more: odd)
    copy = copied_text(Url("memory://b/texts"))
    assert [path.name for path in copy.rglob("*")] == ["a.txt"]
    assert not list(tmp_path.rglob("y"))


def test_an_empty_folder_of_texts_is_named() -> None:
    MemoryFileSystem().makedirs("/b/none")
    with pytest.raises(InputError, match="holds no file"):
        load_corpus("memory://b/none")


def test_a_manifest_lists_nothing_outside_of_its_folder(tmp_path: Path) -> None:
    written("memory://b/run")
    assert local_copy(Url("memory://b/run"), FORMAT).is_relative_to(tmp_path / "cache" / "remote")
