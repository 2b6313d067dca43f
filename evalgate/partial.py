"""Answered windows of an unfinished run, kept in the cache folder until the run is complete.

A run's identity is the hash of everything that changes a number. The same command finds its shards again and
goes on after them; another identity is another folder, so nothing stale is ever mixed in.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalgate.config import cache_path

if TYPE_CHECKING:
    import pyarrow as pa


def identity_hash(identity: Mapping[str, Any]) -> str:
    """xxh3-128 of the identity as canonical JSON."""
    import xxhash

    return str(xxhash.xxh3_128_hexdigest(json.dumps(identity, sort_keys=True, allow_nan=False).encode()))


class PartialRun:
    """Shards of one identity: shard `start` holds windows [start, stop) of the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def shards(self) -> dict[int, tuple[int, pa.Table]]:
        """start -> (stop, table) of every readable shard; an unreadable one is removed."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        found: dict[int, tuple[int, pa.Table]] = {}
        for path in sorted(self.folder.glob("*-*.parquet")):
            try:
                start, stop = map(int, path.stem.split("-"))
                found[start] = (stop, pq.read_table(path))
            except (ValueError, OSError, pa.ArrowException):
                path.unlink()
        return found

    def keep(self, start: int, stop: int, table: pa.Table) -> None:
        """Store a shard: written beside, then renamed."""
        import pyarrow.parquet as pq

        self.folder.mkdir(parents=True, exist_ok=True)
        final = self.folder / f"{start:08d}-{stop:08d}.parquet"
        beside = final.with_suffix(".tmp")
        pq.write_table(table, beside, compression="zstd")
        beside.rename(final)

    def discard(self) -> None:
        """Remove the shards: the run is complete."""
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def partial_run(identity: Mapping[str, Any], *, resume: bool) -> Iterator[PartialRun]:
    """The partial run of this identity, held by one process at a time; resume=False starts it anew.

    While another process runs the same identity, this one works in a folder of its own.
    """
    from filelock import FileLock, Timeout

    root = cache_path() / "partial"
    root.mkdir(parents=True, exist_ok=True)
    name = identity_hash(identity)
    lock = FileLock(root / f"{name}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        import os

        own = PartialRun(root / f"{name}.{os.getpid()}")
        try:
            yield own
        finally:
            own.discard()
        return
    try:
        partial = PartialRun(root / name)
        if not resume:
            partial.discard()
        yield partial
    finally:
        lock.release()
