"""Text to measure on: `load_corpus` turns what the user named into documents."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from platform import python_version
from typing import BinaryIO

from evalgate.core import Document, Skipped
from evalgate.corpora.containers import inner_suffix
from evalgate.corpora.corpus import Corpus, build, digest
from evalgate.corpora.files import TABLE_SUFFIXES, TEXT_SUFFIXES, printable, read_path, text_document
from evalgate.corpora.hub import is_hub_id, read_hub
from evalgate.corpora.parts import Splitter, splitter
from evalgate.corpora.python import read_python
from evalgate.corpora.shipped import LATEST, manifest, read_shipped
from evalgate.errors import InputError, UsageError, closest
from evalgate.store.remote import Url, copied_text, is_url, place

__all__ = ["NAMED", "Corpus", "digest", "is_named", "is_on_hub", "load_corpus", "names"]

STDIN = "-"
DEFAULT, PYTHON, FORMER = "evalgate", "python", "builtin"
NAMED = (DEFAULT, f"{DEFAULT}-v{LATEST}", PYTHON)  # the corpora that come along, as --data names them


def is_named(data: str | Path | None) -> bool:
    """Whether `data` is a corpus that comes along: one of NAMED, or None, the default."""
    return data is None or data in NAMED


def is_on_hub(data: str | Path | None) -> bool:
    """Whether the text would be asked of the hub: it is neither here nor a corpus that evalgate brings along."""
    if data is None or str(data) in (*NAMED, FORMER, STDIN, "") or is_url(str(data)):
        return False
    path = Path(data).expanduser()
    suffixes = TEXT_SUFFIXES + TABLE_SUFFIXES
    return not _exists(path) and isinstance(data, str) and is_hub_id(data) and path.suffix.lower() not in suffixes


def names() -> dict[str, str]:
    """The corpora that have a name, with what each is."""
    said = ("comes with evalgate, the same everywhere", "this version of it", "help and sources of the running Python")
    return dict(zip(NAMED, said, strict=True))


def load_corpus(
    data: str | Path | None,
    *,
    split: str | None = None,
    text_column: str | None = None,
    split_on: str | None = None,
    stdin: BinaryIO | None = None,
    min_bytes: int = 1,
) -> Corpus:
    """The documents of `data`, in a fixed order.

    data: one of
      - None or "evalgate": the latest version of the corpus that comes with evalgate, the same on every machine;
        "evalgate-v1": that version;
      - "python": CPython's help topics (domain `prose`) and standard library sources (domain `code`), interleaved. They
        depend on the Python version: the hash tells;
      - a text file (one document; its domain is the file's stem), or "-" for text on standard input (`stdin`);
      - `.jsonl`, `.ndjson`, `.json` (an array, or JSON lines): rows with `text`, `messages` or ShareGPT's
        `conversations`, and optionally `domain` and `id` or `name`;
      - `.csv`, `.tsv`, `.parquet`, `.arrow`: the column `text_column` (default `text`; the last two may have chats);
      - any of these but Parquet, compressed: `.gz`, `.zst`, `.bz2`, `.xz`;
      - a folder: every visible file below it; domains are its first-level sub-folders;
      - a folder that `datasets` wrote with `save_to_disk`: its rows, of `split` (default `test`) where it has several;
      - a URL of a file or folder that fsspec reaches (s3://, gs://, hf://, https://), copied into the cache folder;
      - a data set on the hub, `org/name`, `name` or either with `#config`: its `split` (default `test`).
    An existing path wins over a data set of the same name, and a corpus that comes along over both.

    A text that holds several documents is cut into them: at wikitext's titles, or where a line matches `split_on`
    ("none" = nowhere). Rows that are paragraphs of one wikitext article are joined. Documents that are empty, only
    whitespace, binary, not UTF-8 or shorter than `min_bytes` UTF-8 bytes, and malformed rows, are skipped and named. A
    leading BOM is dropped; line ends stay as they are.

    Raises UsageError when `split` or `text_column` does not apply, InputError when there is no such file, column,
    split or data set, or no usable document.
    """
    if min_bytes < 1:
        raise UsageError(f"min_bytes is {min_bytes}; give at least 1.")
    name, items = _open(data, split, text_column, splitter(split_on), split_on, stdin)
    return build(name, items, min_bytes=min_bytes)


def _open(
    data: str | Path | None,
    split: str | None,
    text_column: str | None,
    cut: Splitter,
    split_on: str | None,
    stdin: BinaryIO | None,
) -> tuple[str, Iterator[Document | Skipped]]:
    if data is None or is_named(data):
        _refuse(f"the corpus {data or DEFAULT}", split=split, text_column=text_column, split_on=split_on)
        return (f"python-{python_version()}", read_python()) if data == PYTHON else (manifest().title, read_shipped())
    if data == STDIN:
        _refuse("standard input", split=split, text_column=text_column)
        raw = (stdin or sys.stdin.buffer).read()
        text = text_document(raw, name="stdin", domain="stdin")
        return "stdin", iter([text] if isinstance(text, Skipped) else cut(text))
    if not str(data):
        raise UsageError(f"--data is empty; name a file, a folder, a data set or one of {', '.join(NAMED)}.")
    if is_url(str(data)):
        return _open_url(str(data), split, text_column, cut, split_on)
    path = Path(data).expanduser()
    if data == FORMER and not _exists(path):
        raise UsageError(
            "there is no corpus 'builtin' any more: its texts are --data python, and the default is another."
        )
    if _exists(path):
        if path.is_file() and inner_suffix(path) in TABLE_SUFFIXES:
            _refuse(f"the rows of {data}", split_on=split_on)
        return printable(str(path)), read_path(path, text_column=text_column, cut=cut, split=split)
    if isinstance(data, str) and is_on_hub(data):
        name = f"{data}:{split}" if split else data
        _refuse(f"the rows of {data}", split_on=split_on)
        return name, read_hub(data, split=split, text_column=text_column)
    close = closest(path.name, [*names(), *_beside(path)])
    alike = "" if close is None else close if close in names() else str(path.parent / close)
    said = f"did you mean {alike}?" if alike else "check the path given with --data."
    raise InputError(f"there is no file or folder {str(data)!r}: {said}", corpus=str(data))


def _open_url(
    data: str, split: str | None, text_column: str | None, cut: Splitter, split_on: str | None
) -> tuple[str, Iterator[Document | Skipped]]:
    """A text at a URL, copied here and read as it would be here: its documents have the same names and hash."""
    found = place(data)
    path = copied_text(found) if isinstance(found, Url) else found
    if not _exists(path):
        raise InputError(f"there is no file or folder {data!r}: check the address given with --data.", corpus=data)
    if path.is_file() and inner_suffix(path) in TABLE_SUFFIXES:
        _refuse(f"the rows of {data}", split_on=split_on)
    return printable(data), read_path(path, text_column=text_column, cut=cut, split=split)


def _beside(path: Path) -> list[str]:
    """The names of what lies where a missing file was looked for."""
    try:
        return [other.name for other in path.parent.iterdir()]
    except (OSError, ValueError):
        return []


def _refuse(
    kind: str, *, split: str | None = None, text_column: str | None = None, split_on: str | None = None
) -> None:
    """Raises UsageError for an option that `kind` of corpus has no use for."""
    if split is not None:
        raise UsageError(f"--split does not apply to {kind}: only data sets from the hub have splits; leave it out.")
    if text_column is not None:
        raise UsageError(f"--text-column does not apply to {kind}: it has no columns; leave it out.")
    if split_on is not None:
        raise UsageError(f"--split-on does not apply to {kind}: it cuts texts into documents; leave it out.")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", corpus=str(path)) from error
    except (OSError, ValueError):  # a name too long or with a NUL byte names no file
        return False
