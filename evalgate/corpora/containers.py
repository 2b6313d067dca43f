"""Files inside something else: compressed files, folders that `datasets` saved, Git LFS pointers, archives."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from evalgate.errors import InputError

COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar")
_LFS = b"version https://git-lfs.github.com/spec/"
# Files that describe the rows beside them: of a cloned data-set repository, or of a folder that `datasets` wrote.
_DESCRIPTIONS = ("readme", "license", "licence", "copying", "notice", "citation", "changelog", "contributing")
_METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


class Broken(Exception):
    """A container that cannot be opened, in words that follow the file's name."""


def inner_suffix(path: Path) -> str:
    """The suffix that says how a file is read, in lower case: `.jsonl` of `rows.jsonl` and of `rows.jsonl.gz`."""
    return Path(inner_name(path)).suffix.lower()


def inner_name(path: Path) -> str:
    """The file's name without the suffix of its compression."""
    return path.stem if path.suffix.lower() in COMPRESSED else path.name


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed where its name says that it is compressed.

    Raises Broken where the compressed data is damaged or cut off, also while it is read, and for archives and Git LFS
    pointers; OSError as `open` does.
    """
    problem = unreadable(path)
    if problem:
        raise Broken(problem)
    try:
        with _stream(path) as file:
            yield file
    except Exception as error:
        if not isinstance(error, _damage(path)):
            raise
        raise Broken(f"damaged {path.suffix.lower()} data ({str(error).splitlines()[0]})") from error


def unreadable(path: Path) -> str | None:
    """Why a file is a container that is not read, None where it can be read."""
    names = [suffix.lower() for suffix in path.suffixes[-2:]]
    archive = next((suffix for suffix in names if suffix in ARCHIVES), None)
    if archive:
        return f"a {archive} archive, which is not read: unpack it first"
    if inner_suffix(path) == ".parquet" and path.suffix.lower() in COMPRESSED:
        return "a compressed Parquet file, which is not read: unpack it first"
    with path.open("rb") as file:
        if file.read(len(_LFS)) == _LFS:
            return "a Git LFS pointer and not the file itself: run `git lfs pull` in its repository"
    return None


def _stream(path: Path) -> BinaryIO:
    match path.suffix.lower():
        case ".gz":
            import gzip

            return cast(BinaryIO, gzip.open(path, "rb"))
        case ".bz2":
            import bz2

            return cast(BinaryIO, bz2.open(path, "rb"))
        case ".xz":
            import lzma

            return cast(BinaryIO, lzma.open(path, "rb"))
        case ".zst":
            import io

            import pyarrow as pa

            return cast(BinaryIO, io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")))
        case _:
            return path.open("rb")


def _damage(path: Path) -> tuple[type[Exception], ...]:
    """What reading damaged data of this compression raises."""
    match path.suffix.lower():
        case ".gz":
            import zlib
            from gzip import BadGzipFile

            return (BadGzipFile, EOFError, zlib.error)
        case ".bz2":
            return (EOFError, OSError, ValueError)
        case ".xz":
            from lzma import LZMAError

            return (LZMAError, EOFError)
        case ".zst":
            return (OSError,)
        case _:
            return ()


def describes_rows(path: Path) -> bool:
    """Whether a file beside tables describes them (a README, a licence, their metadata) and is not text to score."""
    name = path.name.lower()
    return name in _METADATA or name.split(".")[0] in _DESCRIPTIONS


def is_saved_dataset(folder: Path) -> bool:
    """Whether `datasets` wrote the folder with `save_to_disk`: one data set, or several splits."""
    try:
        return (folder / "dataset_dict.json").is_file() or (
            (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
        )
    except PermissionError:  # the folder may not be searched: whoever lists its files names it as unreadable
        return False


def saved_rows(folder: Path, split: str | None, *, place: str) -> tuple[Sequence[str], Iterator[dict[str, Any]]]:
    """Column names and rows of a folder that `save_to_disk` wrote. split: which one of several, by default `test`.

    Raises InputError for a split that is not there and for a folder that cannot be read.
    """
    if (folder / "dataset_dict.json").is_file():
        folder = folder / _split(folder, split, place)
    elif split is not None:
        raise InputError(f"{place} holds one data set without splits; leave out --split.", corpus=place)
    from datasets import load_from_disk
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        rows = load_from_disk(str(folder))
        return list(rows.column_names), iter(rows)
    except Exception as error:  # `datasets` raises everything
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"{place} is a saved data set that cannot be read ({cause}).", corpus=place) from error


def _split(folder: Path, split: str | None, place: str) -> str:
    try:
        splits = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{place} is a saved data set whose dataset_dict.json is damaged.", corpus=place) from error
    chosen = split or "test"
    if chosen not in splits:
        listed = ", ".join(map(str, splits)) or "none"
        raise InputError(f"{place} has no split {chosen!r}; choose one with --split: {listed}.", corpus=place)
    return chosen
