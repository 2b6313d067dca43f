"""Answered windows of an unfinished run, kept in the cache folder until the run is complete.

A run's identity is the hash of everything that changes a number. The same command finds its shards again and
continues after them; another identity is another folder, so nothing stale is ever mixed in.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalgate.errors import InputError
from evalgate.paths import CACHE_VARIABLE, cache_path
from evalgate.store.files import remove_abandoned, replacing
from evalgate.store.manifest import digest
from evalgate.store.parquet import read_parquet

if TYPE_CHECKING:
    import pyarrow as pa


ABOUT = "about.json"  # in a partial run's folder: its identity


def identity_hash(identity: Mapping[str, Any]) -> str:
    """xxh3-128 of the identity as canonical JSON."""
    import xxhash

    return str(xxhash.xxh3_128_hexdigest(json.dumps(identity, sort_keys=True, allow_nan=False).encode()))


def partial_root() -> Path:
    """The folder of all partial runs, made where it is missing. Raises InputError where it cannot be written."""
    return _made(cache_path() / "partial")


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unwritable(folder, PermissionError(13, "Permission denied"))
    return folder


def _unwritable(folder: Path, error: OSError) -> InputError:
    return InputError(
        f"cannot write to the cache folder {folder} ({error.strerror or error}): "
        f"set {CACHE_VARIABLE} to a folder that can be written",
        folder=str(folder),
    )


class PartialRun:
    """Shards of one identity: shard `start` holds windows [start, stop) of the run.

    Files are START-STOP-SHA256.parquet: one that was cut or altered, and so has another digest, is removed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def shards(self) -> dict[int, tuple[int, pa.Table]]:
        """start -> (stop, table) of every whole shard; any other one is removed."""
        remove_abandoned(self.folder)
        found: dict[int, tuple[int, pa.Table]] = {}
        for path in sorted(self.folder.glob("*.parquet")):
            try:
                start, stop, named = path.stem.split("-")
                content = path.read_bytes()
                if digest(content) != named:
                    raise ValueError
                found[int(start)] = (int(stop), read_parquet(content))
            except (ValueError, OSError):
                with suppress(OSError):  # a folder of that name is not ours to remove
                    path.unlink()
        return found

    def keep(self, start: int, stop: int, table: pa.Table) -> None:
        """Store a shard, whole or not at all. Raises InputError where the disk refuses."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        content = sink.getvalue()
        path = self.folder / f"{start:08d}-{stop:08d}-{digest(content)}.parquet"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(content)
            for other in self.folder.glob(f"{start:08d}-{stop:08d}-*.parquet"):  # one that was not believed
                if other != path:
                    other.unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(self.folder, error) from error

    @property
    def empty(self) -> bool:
        """Whether no answer is kept, of this or of a source below it."""
        return not any(self.folder.rglob("*.parquet"))

    def describe(self, identity: Mapping[str, Any]) -> None:
        """Write down whose answers are kept here, for people and for `unfinished`."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(self.folder / ABOUT) as file:
                file.write(json.dumps(identity, sort_keys=True, allow_nan=False).encode())
        except OSError as error:
            raise _unwritable(self.folder, error) from error

    def tidy(self) -> None:
        """Remove the folder of a run that kept no answer."""
        if self.empty:
            self.discard()

    def discard(self) -> None:
        """Remove the shards: the run is complete."""
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def partial_run(identity: Mapping[str, Any], *, resume: bool) -> Iterator[PartialRun]:
    """The partial run of this identity, held by one process at a time; resume=False starts it anew.

    While another process runs the same identity, this one works in a folder of its own. The lock's file stays:
    removing it while another process opens it would let both hold it.
    """
    from filelock import FileLock, Timeout

    root = partial_root()
    name = identity_hash(identity)
    lock = FileLock(_made(cache_path() / "locks") / f"partial-{name}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        own = PartialRun(root / f"{name}.{os.getpid()}")
        try:
            yield own
        finally:
            own.discard()
        return
    partial = PartialRun(root / name)
    try:
        if not resume:
            partial.discard()
        partial.describe(identity)
        yield partial
    finally:
        partial.tidy()
        lock.release()


def unfinished() -> list[tuple[dict[str, Any], int]]:
    """The identities of unfinished runs that can be read, with how many answers each has kept."""
    found = []
    for about in sorted((cache_path() / "partial").glob(f"*/{ABOUT}")):
        try:
            identity = json.loads(about.read_bytes())
        except (OSError, ValueError):
            continue
        answers = sum(1 for _ in about.parent.rglob("*.parquet"))
        if isinstance(identity, dict) and answers:
            found.append((identity, answers))
    return found
