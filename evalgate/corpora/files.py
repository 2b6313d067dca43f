"""Corpora from files, folders and standard input."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from evalgate.core import Document, Skipped
from evalgate.corpora.containers import (
    Broken,
    describes_rows,
    inner_name,
    inner_suffix,
    is_saved_dataset,
    opened,
    saved_rows,
    unreadable,
)
from evalgate.corpora.parts import Splitter, joined_rows
from evalgate.corpora.rows import needed_columns, row_document
from evalgate.corpora.tables import BOM, read_arrow, read_csv, read_json, read_jsonl, read_parquet, read_tsv
from evalgate.errors import UsageError

Items = Iterator[Document | Skipped]

TEXT_SUFFIXES = (".txt", ".md")
READERS = {
    ".json": read_json,
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}
TABLE_SUFFIXES = tuple(READERS)


def text_document(raw: bytes, *, name: str, domain: str) -> Document | Skipped:
    """Bytes as one text: a leading BOM is dropped, line ends stay as they are."""
    if b"\0" in raw:
        return Skipped(name, "binary (NUL byte)")
    try:
        return Document(name, domain, text=raw.removeprefix(BOM).decode())
    except UnicodeDecodeError as error:
        return Skipped(name, f"not UTF-8 (byte {error.start})")


def read_path(path: Path, *, text_column: str | None, cut: Splitter, split: str | None = None) -> Items:
    """The documents of a file (domain: its stem), of a saved data set, or of every file below a folder.

    cut: what cuts a text into its documents. Raises UsageError when `text_column` is given and nothing there has
    columns, or `split` and nothing there has splits.
    """
    if path.is_dir() and is_saved_dataset(path):
        return _read_saved(path, printable(path.resolve().name), printable(path.resolve().name), text_column, split)
    if split is not None:
        raise UsageError(f"--split does not apply to the path {path}: it has no splits; leave it out.")
    if path.is_dir():
        return _read_folder(path, text_column, cut)
    if text_column is not None and not _is_table(path):
        raise UsageError(f"--text-column does not apply to {path.name}: a text file has no columns; leave it out.")
    domain = printable(Path(inner_name(path)).stem)
    return _read_file(path, place=printable(path.name), domain=domain, text_column=text_column, cut=cut)


def _read_saved(folder: Path, place: str, domain: str, text_column: str | None, split: str | None) -> Items:
    columns, rows = saved_rows(folder, split, place=place)
    needed = needed_columns(columns, text_column, place)
    yield from joined_rows(
        row_document(
            {name: row[name] for name in needed}, place=f"{place}:{number}", domain=domain, text_column=text_column
        )
        for number, row in enumerate(rows, 1)
    )


def _read_folder(root: Path, text_column: str | None, cut: Splitter) -> Items:
    """Files below `root`, sorted by relative path; hidden ones are ignored.

    Names are relative paths; the domain is the first-level sub-folder, or the folder's own name for files in it.
    A folder that `datasets` saved is read as its rows. Beside tables, a README and its like are skipped and named.
    """
    failures: list[OSError] = []
    files = sorted(_walk(root, failures), key=lambda p: p.relative_to(root).as_posix())
    tables = any(_is_table(p) or p.is_dir() for p in files)
    if text_column is not None and not tables:
        raise UsageError(f"--text-column does not apply to {root}: no file in it has columns; leave it out.")
    unreadable = [Skipped(printable(str(e.filename)), f"cannot be read ({e.strerror})") for e in failures]
    own_name = printable(root.resolve().name)

    def items() -> Items:
        yield from unreadable
        for path in files:
            parts = path.relative_to(root).parts
            domain = printable(parts[0]) if len(parts) > 1 else own_name
            column = text_column if _is_table(path) else None
            place = printable("/".join(parts))
            if not path.is_symlink() and path.is_dir():
                yield from _read_saved(path, place, domain, text_column, None)
                continue
            no_file = _no_file(path)
            if no_file:
                yield Skipped(place, no_file)
            elif tables and describes_rows(path):
                yield Skipped(place, "describes the rows beside it")
            else:
                yield from _read_file(path, place=place, domain=domain, text_column=column, cut=cut)

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
    """Everything visible below `root` but its folders; of these only saved data sets, and links to folders.

    Folders that cannot be listed are added to `failures`.
    """
    for folder, subfolders, names in os.walk(root, onerror=failures.append):
        saved = [s for s in subfolders if not s.startswith(".") and is_saved_dataset(Path(folder, s))]
        subfolders[:] = [s for s in subfolders if not s.startswith(".") and s not in saved]
        for name in [*names, *saved, *(s for s in subfolders if Path(folder, s).is_symlink())]:
            if not name.startswith("."):
                yield Path(folder, name)


def _read_file(path: Path, *, place: str, domain: str, text_column: str | None, cut: Splitter) -> Items:
    try:
        problem = unreadable(path)
        if problem:
            yield Skipped(place, problem)
            return
        reader = READERS.get(inner_suffix(path))
        if reader is not None:
            yield from joined_rows(reader(path, place=place, domain=domain, text_column=text_column))
            return
        with opened(path) as file:
            raw = file.read()
        text = text_document(raw, name=place, domain=domain)
        yield from [text] if isinstance(text, Skipped) else cut(text)
    except Broken as problem:
        yield Skipped(place, str(problem))
    except OSError as error:
        yield Skipped(place, f"cannot be read ({error.strerror or error})")


def _is_table(path: Path) -> bool:
    return inner_suffix(path) in TABLE_SUFFIXES


def printable(name: str) -> str:
    """A file name as valid Unicode: bytes that are not UTF-8 become U+FFFD."""
    return os.fsencode(name).decode("utf-8", "replace")
