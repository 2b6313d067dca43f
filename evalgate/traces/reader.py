"""Reading a trace: the manifest at once, the windows and shards when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from evalgate.core import Window, counted
from evalgate.errors import InputError, ScoreError
from evalgate.store.remote import Place, local_copy
from evalgate.traces.batch import PositionBatch, check_batch, concatenate
from evalgate.traces.layout import FORMAT, WINDOWS, Manifest, TraceMeta, broken, read_manifest
from evalgate.traces.tables import read_shard, read_shard_windows, read_windows


@dataclass(frozen=True)
class Trace:
    """A recorded reference. Every file is checked against the manifest when it is read."""

    folder: Path
    manifest: Manifest

    def __len__(self) -> int:
        return self.manifest.positions

    @property
    def meta(self) -> TraceMeta:
        """What was recorded."""
        return self.manifest.meta

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        """The windows it brings, in corpus order. Raises InputError where their file is damaged."""
        path = self.folder / WINDOWS
        return read_windows(FORMAT.checked(path, self.manifest.windows), path, vocab_size=self.meta.source.vocab_size)

    def shard(self, number: int) -> PositionBatch:
        """One shard's rows. Raises InputError where its file is damaged, or has a row that cannot be."""
        name, entry = list(self.manifest.shards.items())[number]
        path = self.folder / name
        batch = shard_of(FORMAT.checked(path, entry), path, self.meta)
        if len(batch) != entry.rows:
            raise broken(path, f"has {counted(len(batch), 'row')} where the manifest says {entry.rows}")
        try:
            check_batch(batch, **self.meta.rows)
        except ScoreError as error:
            raise InputError(f"{path}: {error.message}", file=str(path), **error.context) from None
        return batch

    @property
    def head(self) -> Path | None:
        """The output head's file; None where the trace holds no hidden states."""
        return None if self.manifest.head is None else self.folder / self.manifest.head

    def shard_of_window(self) -> dict[int, int]:
        """Index of every recorded window -> number of its shard. Raises InputError where a file is damaged."""
        found: dict[int, int] = {}
        for number, (name, entry) in enumerate(self.manifest.shards.items()):
            path = self.folder / name
            windows = read_shard_windows(FORMAT.checked(path, entry), path)
            found |= dict.fromkeys(windows, number)
        return found

    def shards(self) -> Iterator[PositionBatch]:
        """Every shard's rows, one shard in memory at a time."""
        return (self.shard(number) for number in range(len(self.manifest.shards)))

    def rows(self) -> PositionBatch:
        """All rows at once: about 650 bytes a position at K = 64 and M = 16."""
        return concatenate(list(self.shards()))


def shard_of(content: bytes, path: Path, meta: TraceMeta) -> PositionBatch:
    """The rows of a shard of a trace. Raises InputError where the content is not one."""
    hidden = "" if meta.hidden is None else meta.hidden.dtype
    return read_shard(content, path, top_k=meta.top_k, tail_samples=meta.tail_samples, hidden=hidden)


def read_trace(place: Place | str) -> Trace:
    """Open a trace folder. That of a URL is copied here first.

    Raises InputError naming a manifest that is missing, altered or unknown, or a file that is missing or cut.
    """
    folder = Path(local_copy(place, FORMAT))
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        FORMAT.check_size(folder / name, entry)
    return Trace(folder, manifest)
