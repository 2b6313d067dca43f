"""What a trace folder holds: the description of its reference, and the manifest that lists its files.

    ref.trace/
    ├── manifest.json          written last; lists and checksums every other file, and itself
    ├── windows.parquet        the windows: ids, score ranges, masks
    └── shard-00000.parquet    positions of whole windows, in the order they were recorded; one shard a batch

While it is recorded the manifest is `manifest.partial.json`, rewritten after every shard.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from evalgate.core import SourceInfo, WindowPolicy
from evalgate.errors import InputError, UsageError

FORMAT = "evalgate-trace"
TRACE_VERSION = 1
MANIFEST, PARTIAL, WINDOWS = "manifest.json", "manifest.partial.json", "windows.parquet"


@dataclass(frozen=True)
class TraceMeta:
    """Everything that makes a recorded reference what it is.

    source: the reference, with weights and tokenizer hashes, dtypes and vocabulary. corpus, corpus_hash: the text.
    top_k: K ids kept exactly per position. tail_samples: M ids drawn from the tail, at least 2; 0 only where top_k
    is the whole vocabulary. seed: of those draws. full: float16 rows over the vocabulary are kept besides.
    versions: of the packages that recorded. certificate: what the producer vouches for (noise floor, checks).
    notes: what a reader must know about exactness.
    """

    source: SourceInfo
    corpus: str
    corpus_hash: str
    policy: WindowPolicy
    top_k: int = 64
    tail_samples: int = 16
    seed: int = 0
    full: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    certificate: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise UsageError where K or M cannot serve as a reference."""
        vocabulary = self.source.vocab_size
        if not 2 <= self.top_k <= vocabulary:
            raise UsageError(f"top_k is {self.top_k}: keep 2 to {vocabulary} ids (the vocabulary) per position")
        whole = self.top_k == vocabulary
        if (self.tail_samples != 0) if whole else (self.tail_samples < 2):
            raise UsageError(
                f"tail_samples is {self.tail_samples}: draw {'none, top_k is the vocabulary' if whole else '2 or more'}"
            )

    @property
    def identity(self) -> TraceMeta:
        """Without what may differ between two recordings of one reference: corpus, certificate, versions, notes."""
        return replace(self, corpus="", corpus_hash="", versions={}, certificate={}, notes=())


@dataclass(frozen=True)
class FileEntry:
    """One file: name in the folder, rows, bytes, xxh3-128 of the bytes in hex."""

    name: str
    rows: int
    bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    """A trace's table of contents. created: UTC, ISO 8601. parents: checksums of the traces it was made from."""

    meta: TraceMeta
    windows: FileEntry
    shards: tuple[FileEntry, ...]
    created: str
    parents: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """Every listed file."""
        return (self.windows, *self.shards)

    @property
    def positions(self) -> int:
        """Recorded positions."""
        return sum(shard.rows for shard in self.shards)

    @property
    def checksum(self) -> str:
        """xxh3-128 of everything else in the manifest."""
        return xxhash.xxh3_128_hexdigest(_canonical(self._body()))

    def to_bytes(self) -> bytes:
        """The file's exact bytes: any other spelling of the same content is refused on reading."""
        return _canonical({**self._body(), "xxh3_128": self.checksum})

    def _body(self) -> dict[str, Any]:
        return {"format": FORMAT, "schema_version": TRACE_VERSION, **asdict(self)}


def parse_manifest(data: bytes, path: Path) -> Manifest:
    """The manifest in `data`; `path` is for messages.

    Raises InputError where it is not JSON, not a trace's, of another version, or altered.
    """
    try:
        body = json.loads(data)
    except ValueError:
        raise broken(path, "is not complete JSON") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise InputError(f"{path} is not the manifest of a trace: name a folder that evalgate recorded", file=str(path))
    version = body.get("schema_version")
    if version != TRACE_VERSION:
        raise InputError(
            f"{path} has schema version {version} and this evalgate reads {TRACE_VERSION}: "
            "read it with the evalgate that wrote it, or record again",
            file=str(path),
        )
    try:
        manifest = _from_json(body)
        same = manifest.to_bytes() == data
    except (KeyError, TypeError, ValueError):
        raise broken(path, "lacks a field or has an unknown one") from None
    if not same:
        raise broken(path, "was altered after recording")
    return manifest


def read_manifest(folder: Path, *, name: str = MANIFEST) -> Manifest:
    """Read a trace folder's manifest. Raises InputError where there is none, or as `parse_manifest`."""
    path = folder / name
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        unfinished = name == MANIFEST and (folder / PARTIAL).is_file()
        what = "its recording never finished: resume it" if unfinished else "name a folder that evalgate recorded"
        raise InputError(f"{folder} is not a complete trace, it has no {name}: {what}", file=str(path)) from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}", file=str(path)) from error
    return parse_manifest(data, path)


def broken(path: Path, what: str) -> InputError:
    """The error for a damaged file of a trace."""
    return InputError(f"{path} {what}: copy the trace again, or record it again", file=str(path))


def read_checked(folder: Path, entry: FileEntry) -> bytes:
    """The bytes of a listed file. Raises InputError naming a file that is missing, cut or altered."""
    path = folder / entry.name
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise broken(path, "is missing") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}", file=str(path)) from error
    if len(data) != entry.bytes:
        raise broken(path, f"has {len(data)} bytes where the manifest says {entry.bytes}")
    if xxhash.xxh3_128_hexdigest(data) != entry.xxh3_128:
        raise broken(path, "was altered after recording")
    return data


def _canonical(body: Mapping[str, Any]) -> bytes:
    return (json.dumps(body, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def _from_json(body: dict[str, Any]) -> Manifest:
    meta = dict(body["meta"])
    return Manifest(
        meta=TraceMeta(
            **{
                **meta,
                "source": SourceInfo(**meta["source"]),
                "policy": WindowPolicy(**meta["policy"]),
                "notes": tuple(meta["notes"]),
            }
        ),
        windows=FileEntry(**body["windows"]),
        shards=tuple(FileEntry(**shard) for shard in body["shards"]),
        created=body["created"],
        parents=tuple(body["parents"]),
    )
