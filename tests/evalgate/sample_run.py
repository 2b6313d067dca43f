"""A fabricated run: a seeded token-score table and its summary, no model involved."""

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from evalgate.metrics import Kind, registry
from evalgate.stats.summarize import summarize
from evalgate.store.alternatives import schema as alternatives_schema
from evalgate.summary import Comparison, Corpus, Group, SkippedDocument, Source, Summary
from evalgate.table import schema as table_schema

CREATED = "2026-01-02T03:04:05+00:00"


def source(spec: str, **changes: object) -> Source:
    values: dict[str, object] = {
        "spec": spec,
        "name": spec.partition("@")[0],
        "kind": "embedded",
        "vocab_size": 1000,
        "context_length": 2048,
        "weights_hash": "0123456789abcdef0123456789abcdef",
        "tokenizer_hash": "feed",
        "dtype": "bfloat16",
        "compute_dtype": "float32",
        "logits_dtype": "float32",
        "load_mode": "as stored",
        "backend": "packed",
        "noise_floor": 1.5e-6,
    }
    return Source.model_validate({**values, **changes})


def token_table(candidates: tuple[str, ...], *, documents: int = 4, pair: bool = True, size: float = 0.01) -> pa.Table:
    """30 positions per document, documents alternating between the domains `prose` and `code`."""
    schema = table_schema(pair=pair)
    random = np.random.default_rng(7)
    parts = []
    n = documents * 30
    tokens = random.integers(0, 1000, n)
    for candidate in candidates:
        which = np.repeat(np.arange(documents), 30)
        columns: dict[str, object] = {
            "candidate": [candidate] * n,
            "domain": [("prose", "code")[d % 2] for d in which],
            "document": [f"doc{d}" for d in which],
            "window": which,
            "position": np.tile(np.arange(1, 31), documents),
            "bytes": np.full(n, 4),
            "token": tokens,
        }
        for name in schema.names:
            if name not in columns:
                integer = pa.types.is_integer(schema.field(name).type)
                columns[name] = random.integers(1, 4, n) if integer else random.exponential(size, n)
        columns["cand_nll"] = random.exponential(2.0, n)
        if pair:
            columns["ref_nll"] = np.abs(np.asarray(columns["cand_nll"]) + random.normal(0, size, n))
            for name in ("tv", "topk_overlap"):
                columns[name] = random.uniform(0, 1, n)
        parts.append(pa.table([pa.array(columns[f.name]).cast(f.type) for f in schema], schema=schema))
    return pa.concat_tables(parts)


ALTERNATIVES = (
    ([7, 3, 900], [-0.5, -2.0, -2.0]),
    ([], []),
    (list(range(1, 11)), [-1.0 - n for n in range(10)]),
)


def listed(table: pa.Table, rows: Sequence[int] = (2, 5, 30), lists: Any = ALTERNATIVES) -> pa.Table:
    """Alternatives of some rows of a table, the same ids and logprobs for both sides."""
    places = table.take(pa.array(rows))
    columns = [places.column("candidate").cast(pa.string()), places.column("window"), places.column("position")]
    ids = pa.array([tokens for tokens, _ in lists], pa.list_(pa.int32()))
    logprobs = pa.array([values for _, values in lists], pa.list_(pa.float32()))
    return pa.table([*columns, *[ids, logprobs] * 2], schema=alternatives_schema())


@cache
def _groups(
    table: bytes, kind: Kind, noise_floor: float | None, metrics: tuple[str, ...]
) -> list[tuple[str, Group, list[Group]]]:
    return summarize(pa.ipc.open_stream(table).read_all(), kind=kind, noise_floor=noise_floor)


def summarized(table: pa.Table, *, kind: Kind, noise_floor: float | None) -> list[tuple[str, Group, list[Group]]]:
    """What `summarize` gives, computed once for equal tables: its intervals take most of the time of many tests."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table.combine_chunks())
    return copy.deepcopy(_groups(sink.getvalue().to_pybytes(), kind, noise_floor, tuple(registry())))


def summary(table: pa.Table, *, kind: Kind = "kl", reference: Source | None = None, **changes: object) -> Summary:
    floor = reference.noise_floor if reference else None
    comparisons = [
        Comparison(candidate=source(candidate, name=candidate), overall=overall, domains=domains)
        for candidate, overall, domains in summarized(table, kind=kind, noise_floor=floor)
    ]
    values: dict[str, object] = {
        "evalgate_version": "0.1.0",
        "kind": kind,
        "created": CREATED,
        "seed": 0,
        "corpus": Corpus(
            name="builtin",
            hash="abcdef0123456789abcdef0123456789",
            documents=4,
            tokens=130,
            skipped=[SkippedDocument(name="prose/empty", reason="empty")],
            window_preset="disjoint",
            context=512,
            stride=512,
        ),
        "reference": reference,
        "comparisons": comparisons,
        "seconds": 1.25,
        "versions": {"python": "3.11"},
        "notes": ["a note that a reader must know"],
    }
    return Summary.model_validate({**values, **changes})


def reseal(folder: Path, change: Callable[[dict[str, Any]], object] = lambda manifest: None) -> None:
    """Rewrite the manifest with right digests after a change, as an evalgate of another version would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    for name, entry in manifest["files"].items():
        entry["bytes"] = (folder / name).stat().st_size
        entry["sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    del manifest["sha256"]
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    manifest["sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
