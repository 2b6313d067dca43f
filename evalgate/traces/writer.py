"""Recording a trace: a shard per batch, each renamed into place and listed, the manifest last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from evalgate.core import Window
from evalgate.errors import InputError, MismatchError, ScoreError, UsageError
from evalgate.store.files import SCRATCH, link_file, write_file
from evalgate.store.manifest import FileEntry
from evalgate.traces.batch import PositionBatch, check_batch
from evalgate.traces.layout import FORMAT, MANIFEST, PARTIAL, WINDOWS, Manifest, TraceMeta, read_manifest
from evalgate.traces.reader import Trace, shard_of
from evalgate.traces.tables import read_windows, shard_bytes, windows_bytes


class TraceWriter:
    """Records one trace folder.

    Every shard holds all scored positions of some windows. What is on disk is at every moment either listed and
    whole, or not listed and thrown away by `resume`.
    """

    def __init__(
        self,
        folder: Path | str,
        meta: TraceMeta,
        *,
        windows: Sequence[Window],
        parents: Sequence[str] = (),
        head: Path | None = None,
    ) -> None:
        """Start a new trace of these windows (indices unique) in a folder that does not exist or is empty.

        parents: checksums of the traces it is made from. head: the output head's file, of a trace of hidden states; it
        is linked into the folder, so that traces of one disk share it, or copied.
        Raises UsageError where the folder is taken or K, M or the windows do not fit; InputError from the disk.
        """
        self.folder = Path(folder)
        meta.check()
        self._windows = _by_index(windows)
        self._done: set[int] = set()
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise UsageError(
                f"{self.folder} is not an empty folder: choose another name, or resume the recording",
                folder=str(self.folder),
            )
        self._write_folder()
        entry = self._write(WINDOWS, windows_bytes(windows), rows=len(windows))
        created = datetime.now(UTC).isoformat(timespec="seconds")
        files = {WINDOWS: entry}
        if meta.hidden is not None:
            if head is None:
                raise UsageError("a trace of hidden states needs the output head that multiplies them")
            files[meta.hidden.file] = self._link(head, meta.hidden.file, meta.hidden.head)
        self._manifest = Manifest(meta=meta, files=files, created=created, parents=tuple(parents))
        write_file(self.folder / PARTIAL, self._manifest.to_bytes())

    @classmethod
    def resume(cls, folder: Path | str, meta: TraceMeta, *, windows: Sequence[Window]) -> TraceWriter:
        """Go on with a recording that did not finish; files that were not listed yet are deleted.

        Raises MismatchError where the reference, policy, corpus or windows are others than those it began with;
        InputError where there is nothing to resume, or a listed file is damaged (named).
        """
        self = cls.__new__(cls)
        self.folder = Path(folder)
        self._manifest = read_manifest(self.folder, name=PARTIAL)
        old = self._manifest.meta
        if (old.identity, old.corpus_hash) != (meta.identity, meta.corpus_hash):
            raise MismatchError(
                f"{self.folder} was begun with another reference, corpus or setting: record into a new folder",
                folder=str(self.folder),
            )
        path, size = self.folder / WINDOWS, old.source.vocab_size
        if read_windows(FORMAT.checked(path, self._manifest.windows), path, vocab_size=size) != tuple(windows):
            raise MismatchError(
                f"{self.folder} was begun with other windows: record into a new folder", folder=str(self.folder)
            )
        self._windows = _by_index(windows)
        self._done = set()
        if self._manifest.head is not None:
            FORMAT.check(self.folder / self._manifest.head, self._manifest.files[self._manifest.head])
        for name, entry in self._manifest.shards.items():
            path = self.folder / name
            self._done.update(shard_of(FORMAT.checked(path, entry), path, old).window.tolist())
        self._drop_unlisted()
        return self

    @property
    def done(self) -> frozenset[int]:
        """Indices of the windows that are recorded."""
        return frozenset(self._done)

    @property
    def remaining(self) -> tuple[Window, ...]:
        """The windows still to be recorded, in order."""
        return tuple(w for index, w in self._windows.items() if index not in self._done)

    def append(self, shard: PositionBatch) -> None:
        """Write one shard: all scored positions of one or more windows, each window's positions ascending.

        Raises ScoreError for values that cannot be (named by window and position), positions that are missing,
        strange or recorded before; InputError from the disk.
        """
        meta = self._manifest.meta
        check_batch(shard, **meta.rows)
        indices = self._check_places(shard)
        name = f"shard-{len(self._manifest.shards):05d}.parquet"
        entry = self._write(name, shard_bytes(shard, self._windows), rows=len(shard))
        self._manifest = replace(self._manifest, files={**self._manifest.files, name: entry})
        write_file(self.folder / PARTIAL, self._manifest.to_bytes())
        self._done.update(indices)

    @property
    def recorded(self) -> Trace:
        """What is recorded so far, read from its files."""
        return Trace(self.folder, self._manifest)

    def finish(self) -> Manifest:
        """Write the manifest. Raises ScoreError naming the first window that was not recorded."""
        missing = self.remaining
        if missing:
            raise ScoreError(
                f"window {missing[0].index} of {self.folder} was not recorded ({len(missing)} such windows): "
                "resume the recording",
                window=missing[0].index,
            )
        write_file(self.folder / MANIFEST, self._manifest.to_bytes())
        (self.folder / PARTIAL).unlink()
        return self._manifest

    def _check_places(self, shard: PositionBatch) -> list[int]:
        indices = list(dict.fromkeys(shard.window.tolist()))
        stray = next((i for i in indices if i not in self._windows or i in self._done), None)
        if stray is not None or not indices:
            what = "the shard is empty" if stray is None else f"window {stray} is unknown or already recorded"
            raise ScoreError(f"{self.folder}: {what}: append each window once", window=stray)
        windows = [self._windows[i] for i in indices]
        want = [(w.index, p, w.ids[p], w.bytes_per_token[p]) for w in windows for p in w.positions]
        columns = (shard.window, shard.position, shard.token, shard.bytes)
        have = list(zip(*(c.tolist() for c in columns), strict=True))
        if have != want:
            at = next((i for i, pair in enumerate(zip(have, want, strict=False)) if pair[0] != pair[1]), len(have))
            place = (want[at] if at < len(want) else have[at])[:2]
            raise ScoreError(
                f"window {place[0]}, position {place[1]}: window, position, token and bytes must be those of "
                "the windows, each scored position once and in order: record that window again",
                window=place[0],
                position=place[1],
            )
        return indices

    def _write_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot make {self.folder}: {error.strerror or error}", folder=str(self.folder)
            ) from error

    def _link(self, head: Path, name: str, digest: str) -> FileEntry:
        """The head's file under its name in the folder. Raises InputError where it is another one, or from the disk."""
        try:
            link_file(head, self.folder / name)
            entry = FileEntry.of_file(self.folder / name)
        except OSError as error:
            raise InputError(f"cannot write {self.folder / name}: {error.strerror or error}", file=name) from error
        if entry.sha256 != digest:
            raise InputError(f"{head} is another output head than the one that was named", file=str(head))
        return entry

    def _write(self, name: str, content: bytes, *, rows: int) -> FileEntry:
        write_file(self.folder / name, content)
        return FileEntry.of(content, rows=rows)

    def _drop_unlisted(self) -> None:
        listed = {PARTIAL, *self._manifest.files}
        for path in self.folder.iterdir():
            ours = path.name.startswith(("shard-", SCRATCH[0]))
            if ours and path.name not in listed:
                path.unlink()


def _by_index(windows: Sequence[Window]) -> dict[int, Window]:
    found = {w.index: w for w in windows}
    if len(found) != len(windows) or not windows:
        raise UsageError("a trace needs at least one window, each with its own index")
    empty = next((w for w in windows if not w.positions), None)
    if empty is not None:
        raise UsageError(f"window {empty.index} has no scored position: leave it out", window=empty.index)
    return found
