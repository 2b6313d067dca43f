"""What a trace folder holds: the description of its reference, and the manifest that lists its files.

    ref.trace/
    ├── manifest.json          written last; lists and checksums every other file, and itself
    ├── windows.parquet        the windows: ids, score ranges, masks
    ├── head-HASH.safetensors  of hidden states: the output head that multiplies them (evalgate.traces.head)
    └── shard-00000.parquet    positions of whole windows, in the order they were recorded; one shard a batch

While it is recorded the manifest is `manifest.partial.json`, rewritten after every shard.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from evalgate.core import LayerKind, SourceInfo, WindowPolicy
from evalgate.errors import InputError, UsageError
from evalgate.store.manifest import FileEntry, Format

FORMAT = Format(
    "evalgate-trace", 2, noun="trace", wanted="name a folder that evalgate recorded", anew="record it again"
)
MANIFEST, PARTIAL, WINDOWS = "manifest.json", "manifest.partial.json", "windows.parquet"


HIDDEN_K = 2  # likeliest ids that a trace of hidden states keeps, to be checked by
CUT = "after the final norm, before the output head"


@dataclass(frozen=True)
class HiddenStates:
    """What a trace of hidden states keeps at each position: the vector that the output head multiplies.

    size: numbers of a row. dtype: in which the body computed them. head: SHA-256 of the output head's file, which is in
    the folder. cut: where in the model they are taken.
    """

    size: int
    dtype: Literal["float32", "bfloat16", "float16"]
    head: str
    cut: str = CUT

    @property
    def file(self) -> str:
        """The name of the head's file."""
        return f"head-{self.head[:16]}.safetensors"


@dataclass(frozen=True)
class TraceMeta:
    """Everything that makes a recorded reference what it is.

    source: the reference, with weights and tokenizer hashes, dtypes and vocabulary. corpus, corpus_hash: the text.
    top_k: K ids kept exactly per position. tail_samples: M ids drawn from the tail, at least 2; 0 only where top_k
    is the whole vocabulary. seed: of those draws. full: float16 rows over the vocabulary are kept besides.
    hidden: hidden states are kept, from which the reference's whole distributions are computed again; top_k is then
    HIDDEN_K and nothing is drawn. versions: of the packages that recorded. certificate: what the producer vouches for
    (noise floor, checks).
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
    hidden: HiddenStates | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    certificate: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise UsageError where K or M cannot serve as a reference."""
        vocabulary = self.source.vocab_size
        if self.hidden is not None:
            if (self.top_k, self.tail_samples, self.full) != (min(HIDDEN_K, vocabulary), 0, False):
                raise UsageError("a trace of hidden states keeps no lists, draws or rows: leave them out")
            if self.hidden.size < 1 or len(self.hidden.head) != 64 or set(self.hidden.head) - set("0123456789abcdef"):
                raise UsageError("hidden states have a size and the SHA-256 of their output head")
            return
        if not 2 <= self.top_k <= vocabulary:
            raise UsageError(f"top_k is {self.top_k}: keep 2 to {vocabulary} ids (the vocabulary) per position")
        whole = self.top_k == vocabulary
        if (self.tail_samples != 0) if whole else (self.tail_samples < 2):
            raise UsageError(
                f"tail_samples is {self.tail_samples}: draw {'none, top_k is the vocabulary' if whole else '2 or more'}"
            )

    @property
    def rows(self) -> dict[str, Any]:
        """What `evalgate.traces.batch.check_batch` has to know of the rows."""
        hidden = None if self.hidden is None else (self.hidden.size, self.hidden.dtype)
        known = {"top_k": self.top_k, "tail_samples": self.tail_samples, "full": self.full, "hidden": hidden}
        return {"vocab_size": self.source.vocab_size, **known}

    @property
    def identity(self) -> TraceMeta:
        """Without what may differ between two recordings of one reference: corpus, certificate, versions, notes."""
        return replace(self, corpus="", corpus_hash="", versions={}, certificate={}, notes=())


@dataclass(frozen=True)
class Manifest:
    """A trace's table of contents.

    files: entries by name, the windows first, then the shards as they were recorded. created: UTC, ISO 8601. parents:
    checksums of the traces it was made from.
    """

    meta: TraceMeta
    files: Mapping[str, FileEntry]
    created: str
    parents: tuple[str, ...] = ()

    @property
    def windows(self) -> FileEntry:
        """The file of the windows."""
        return self.files[WINDOWS]

    @property
    def shards(self) -> dict[str, FileEntry]:
        """The files of the positions."""
        return {name: entry for name, entry in self.files.items() if name not in (WINDOWS, self.head)}

    @property
    def head(self) -> str | None:
        """The name of the output head's file; None where the trace holds no hidden states."""
        return None if self.meta.hidden is None else self.meta.hidden.file

    @property
    def positions(self) -> int:
        """Recorded positions."""
        return sum(shard.rows or 0 for shard in self.shards.values())

    @property
    def checksum(self) -> str:
        """SHA-256 of everything else in the manifest."""
        return FORMAT.checksum(self._body(), self.files)

    def to_bytes(self) -> bytes:
        """The manifest file."""
        return FORMAT.sealed(self._body(), self.files)

    def _body(self) -> dict[str, Any]:
        meta = asdict(self.meta)
        if self.meta.hidden is None:  # as manifests were before there were such traces
            del meta["hidden"]
        return {"meta": meta, "created": self.created, "parents": list(self.parents)}


def read_manifest(folder: Path, *, name: str = MANIFEST) -> Manifest:
    """Read a trace folder's manifest.

    Raises InputError where there is none, and where it is not JSON, not a trace's, of another version, or altered.
    """
    path = folder / name
    if name == MANIFEST and not path.exists() and (folder / PARTIAL).is_file():
        raise InputError(f"{folder} is not a complete trace, its recording never finished: resume it", file=str(path))
    body = FORMAT.read(path)
    try:
        return _from_json(body)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise broken(path, "lacks a field, or has one that is unknown or cannot be") from None


def broken(path: Path, what: str) -> InputError:
    """The error for a damaged file of a trace."""
    return FORMAT.broken(path, what)


def _from_json(body: dict[str, Any]) -> Manifest:
    known = {"format", "schema_version", "meta", "created", "parents", "files", "sha256"}
    files = FORMAT.entries(body)
    found = Manifest(
        meta=_meta(body["meta"]),
        files=files,
        created=_texts([body["created"]])[0],
        parents=_texts(body["parents"]),
    )
    tables = {WINDOWS: files[WINDOWS], **found.shards}
    if set(body) != known or any(entry.rows is None for entry in tables.values()):
        raise KeyError
    if found.head is not None and found.meta.hidden is not None:
        head = files[found.head]
        if head.sha256 != found.meta.hidden.head or head.rows is not None:
            raise KeyError
    return found


def _meta(body: dict[str, Any]) -> TraceMeta:
    """KeyError, TypeError or ValueError where a field is missing, unknown or not of its type, or K and M cannot be."""
    from pydantic import TypeAdapter

    meta = TraceMeta(
        **{
            **body,
            "source": _source(body["source"]),
            "policy": WindowPolicy(**body["policy"]),
            "hidden": None if body.get("hidden") is None else HiddenStates(**body["hidden"]),
            "notes": tuple(body["notes"]),
        }
    )
    TypeAdapter(TraceMeta).validate_json(json.dumps(body), strict=True)
    floors = [floor for part in _certificates(meta) for floor in (part.get("noise_floor"), part.get("kl_floor"))]
    floors += [meta.source.noise_floor, meta.source.kl_floor]
    counts = (meta.source.vocab_size, meta.policy.context, meta.policy.stride, meta.seed + 1, meta.tail_samples + 1)
    if not all(floor is None or (type(floor) in (int, float) and floor >= 0) for floor in floors) or min(counts) < 1:
        raise ValueError
    try:
        meta.check()
    except UsageError as error:
        raise ValueError(error.message) from error
    return meta


def _certificates(meta: TraceMeta) -> list[Mapping[str, Any]]:
    parts = meta.certificate.get("merged", [meta.certificate])
    if not isinstance(parts, list) or not parts or not all(isinstance(part, Mapping) for part in parts):
        raise TypeError
    return parts


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError
    return tuple(values)


def _source(body: dict[str, Any]) -> SourceInfo:
    layers = tuple(LayerKind(**kind) for kind in body.get("layers", ()))
    return SourceInfo(**{**body, "layers": layers})
