"""Corpora from files, folders and standard input."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from evalgate.core import Document, Skipped
from evalgate.corpora.tables import BOM, read_csv, read_jsonl, read_parquet
from evalgate.errors import UsageError

TEXT_SUFFIXES = (".txt", ".md")
TABLE_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")


def text_document(raw: bytes, *, name: str, domain: str) -> Document | Skipped:
    """Bytes as one text: a leading BOM is dropped, line ends stay as they are."""
    if b"\0" in raw:
        return Skipped(name, "binary (NUL byte)")
    try:
        return Document(name, domain, text=raw.removeprefix(BOM).decode())
    except UnicodeDecodeError as error:
        return Skipped(name, f"not UTF-8 (byte {error.start})")


def read_path(path: Path, *, text_column: str | None) -> Iterator[Document | Skipped]:
    """The documents of a file (domain: its stem) or of every file below a folder.

    Raises UsageError when `text_column` is given and nothing there has columns.
    """
    if path.is_dir():
        return _read_folder(path, text_column)
    if text_column is not None and not _is_table(path):
        raise UsageError(f"--text-column does not apply to {path.name}: a text file has no columns; leave it out.")
    return _read_file(path, place=printable(path.name), domain=printable(path.stem), text_column=text_column)


def _read_folder(root: Path, text_column: str | None) -> Iterator[Document | Skipped]:
    """Files below `root`, sorted by relative path; hidden ones are ignored.

    Names are relative paths; the domain is the first-level sub-folder, or the folder's own name for files in it.
    """
    failures: list[OSError] = []
    files = sorted(_walk(root, failures), key=lambda p: p.relative_to(root).as_posix())
    if text_column is not None and not any(_is_table(p) for p in files):
        raise UsageError(f"--text-column does not apply to {root}: no file in it has columns; leave it out.")
    unreadable = [Skipped(printable(str(e.filename)), f"cannot be read ({e.strerror})") for e in failures]
    own_name = printable(root.resolve().name)

    def items() -> Iterator[Document | Skipped]:
        yield from unreadable
        for path in files:
            parts = path.relative_to(root).parts
            domain = printable(parts[0]) if len(parts) > 1 else own_name
            column = text_column if _is_table(path) else None
            place = printable("/".join(parts))
            no_file = _no_file(path)
            if no_file:
                yield Skipped(place, no_file)
            else:
                yield from _read_file(path, place=place, domain=domain, text_column=column)

    return items()


def _no_file(path: Path) -> str | None:
    """Why an entry of a folder is no file to read, None where it is one: opening a pipe would wait for its writer."""
    try:
        if path.is_file():
            return None
        if not path.exists():
            return "a link to nothing"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return (
        "a link to a folder, which is not followed" if path.is_dir() else "no regular file (a pipe, socket or device)"
    )


def _walk(root: Path, failures: list[OSError]) -> Iterator[Path]:
    """Everything visible below `root` but its folders, links to folders too.

    Folders that cannot be listed are added to `failures`.
    """
    for folder, subfolders, names in os.walk(root, onerror=failures.append):
        subfolders[:] = [s for s in subfolders if not s.startswith(".")]
        for name in [*names, *(s for s in subfolders if Path(folder, s).is_symlink())]:
            if not name.startswith("."):
                yield Path(folder, name)


def _read_file(path: Path, *, place: str, domain: str, text_column: str | None) -> Iterator[Document | Skipped]:
    try:
        yield from _rows(path, place, domain, text_column)
    except OSError as error:
        yield Skipped(place, f"cannot be read ({error.strerror or error})")


def _rows(path: Path, place: str, domain: str, text_column: str | None) -> Iterable[Document | Skipped]:
    match path.suffix.lower():
        case ".jsonl" | ".ndjson":
            return read_jsonl(path, place=place, domain=domain, text_column=text_column)
        case ".csv":
            return read_csv(path, place=place, domain=domain, text_column=text_column, delimiter=",")
        case ".tsv":
            return read_csv(path, place=place, domain=domain, text_column=text_column, delimiter="\t")
        case ".parquet":
            return read_parquet(path, place=place, domain=domain, text_column=text_column)
        case _:
            return [text_document(path.read_bytes(), name=place, domain=domain)]


def _is_table(path: Path) -> bool:
    return path.suffix.lower() in TABLE_SUFFIXES


def printable(name: str) -> str:
    """A file name as valid Unicode: bytes that are not UTF-8 become U+FFFD."""
    return os.fsencode(name).decode("utf-8", "replace")
