"""A trace's Parquet files to and from memory: zstd, BYTE_STREAM_SPLIT for ids and floats, no nulls."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evalgate.core import Window
from evalgate.store.parquet import read_parquet
from evalgate.traces.batch import PositionBatch
from evalgate.traces.layout import broken

if TYPE_CHECKING:
    import pyarrow as pa

COMPRESSION_LEVEL = 9
HIDDEN_LEVEL = 1  # more takes longer and saves nothing: the mantissas of hidden states are noise
FLAT = ("window", "position", "token", "bytes", "logprob", "rank", "entropy", "tail_mass")
WIDE = ("top_ids", "top_logprobs", "tail_ids", "tail_logprobs")


def shard_bytes(batch: PositionBatch, windows: Mapping[int, Window]) -> bytes:
    """A shard's Parquet bytes. `windows` by index names each position's document and domain."""
    import pyarrow as pa

    numbers = batch.window.tolist()
    columns: dict[str, pa.Array] = {
        "document": pa.array([windows[w].document for w in numbers], pa.string()).dictionary_encode(),
        "domain": pa.array([windows[w].domain for w in numbers], pa.string()).dictionary_encode(),
    }
    columns |= {name: pa.array(getattr(batch, name)) for name in FLAT}
    columns |= {name: _fixed_lists(getattr(batch, name)) for name in WIDE if getattr(batch, name).shape[1]}
    if batch.shifted is not None and batch.lse is not None:
        columns |= {"lse": pa.array(batch.lse), "shifted": _fixed_lists(batch.shifted)}
    if batch.hidden is not None and batch.digest is not None:
        states = batch.hidden.view(np.float16) if batch.hidden.dtype == np.uint16 else batch.hidden
        columns |= {"digest": pa.array(batch.digest), "hidden": _fixed_lists(states)}
    return _parquet(columns, split=[*FLAT, *WIDE, "lse", "shifted", "hidden"])


def read_shard(data: bytes, path: Path, *, top_k: int, tail_samples: int, hidden: str = "") -> PositionBatch:
    """The rows of a shard. hidden: dtype of its hidden states, "" = it has none.

    Raises InputError where the bytes are not a shard of this K and M.
    """
    import pyarrow as pa

    table = _read(data, path)
    sizes = {"top_ids": top_k, "top_logprobs": top_k, "tail_ids": tail_samples, "tail_logprobs": tail_samples}
    try:
        values: dict[str, Any] = {name: _flat(table, name) for name in FLAT}
        for name, width in sizes.items():
            kind = np.int32 if name.endswith("ids") else np.float32
            empty = np.zeros((table.num_rows, 0), kind)
            values[name] = _matrix(table, name).reshape(-1, width) if width else empty
        if "shifted" in table.column_names:
            shifted = _matrix(table, "shifted")
            values |= {"shifted": shifted.reshape(table.num_rows, -1), "lse": _flat(table, "lse")}
        if hidden:
            states = _matrix(table, "hidden").reshape(table.num_rows, -1)
            states = states.view(np.uint16) if hidden == "bfloat16" else states
            values |= {"hidden": states, "digest": _flat(table, "digest")}
    except (KeyError, ValueError, AttributeError, pa.ArrowException) as error:
        raise broken(path, f"is not a shard of this trace ({error})") from error
    return PositionBatch(**values)


def read_shard_windows(data: bytes, path: Path) -> list[int]:
    """Indices of the windows in a shard, as they come. Raises InputError where the bytes are not a shard."""
    try:
        return list(dict.fromkeys(_flat(_read(data, path), "window").tolist()))
    except (KeyError, ValueError) as error:
        raise broken(path, "is not a shard of a trace") from error


def windows_bytes(windows: Sequence[Window]) -> bytes:
    """The Parquet bytes of the windows, in the given order."""
    import pyarrow as pa

    columns = {
        "index": pa.array([w.index for w in windows], pa.int32()),
        "document": pa.array([w.document for w in windows], pa.string()),
        "domain": pa.array([w.domain for w in windows], pa.string()),
        "score_from": pa.array([w.score_from for w in windows], pa.int32()),
        "score_to": pa.array([w.score_to for w in windows], pa.int32()),
        "ids": pa.array([w.ids for w in windows], pa.list_(pa.int32())),
        "bytes_per_token": pa.array([w.bytes_per_token for w in windows], pa.list_(pa.int32())),
        "mask": pa.array([w.mask for w in windows], pa.list_(pa.bool_())),
    }
    return _parquet(columns, split=["ids", "bytes_per_token"])


def read_windows(data: bytes, path: Path, *, vocab_size: int) -> tuple[Window, ...]:
    """The windows in `data`. Raises InputError where it is not a trace's windows file, or a window cannot be."""
    table = _read(data, path)
    if not table.schema.equals(_windows_schema()):
        raise broken(path, "is not a table of windows")
    found = tuple(
        Window(**{**row, **{name: tuple(row[name]) for name in ("ids", "bytes_per_token", "mask")}})
        for row in table.to_pylist()
    )
    for row, window in enumerate(found):
        if not _possible(window, vocab_size):
            raise broken(path, f"has a window at row {row} whose tokens and scored positions do not fit")
    if len({window.index for window in found}) < len(found):
        raise broken(path, "has two windows of one index")
    return found


def _windows_schema() -> pa.Schema:
    """Of `windows_bytes`: nothing is null but what Arrow lets an item of a list be."""
    import pyarrow as pa

    numbers = [pa.field(name, pa.int32(), nullable=False) for name in ("index", "score_from", "score_to")]
    texts = [pa.field(name, pa.string(), nullable=False) for name in ("document", "domain")]
    kinds = {"ids": pa.int32(), "bytes_per_token": pa.int32(), "mask": pa.bool_()}
    lists = [pa.field(name, pa.list_(pa.field("element", kind)), nullable=False) for name, kind in kinds.items()]
    return pa.schema([numbers[0], *texts, *numbers[1:], *lists])


def _possible(window: Window, vocab_size: int) -> bool:
    scored = window.score_to - window.score_from
    return (
        window.index >= 0
        and 1 <= window.score_from < window.score_to <= len(window.ids) == len(window.bytes_per_token)
        and all(token is not None and 0 <= token < vocab_size for token in window.ids)
        and all(size is not None and size >= 0 for size in window.bytes_per_token)
        and (not window.mask or (len(window.mask) == scored and None not in window.mask))
    )


def _fixed_lists(values: np.ndarray[Any, Any]) -> pa.Array:
    import pyarrow as pa

    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    kind = pa.list_(pa.field("element", flat.type, nullable=False), values.shape[1])
    return pa.FixedSizeListArray.from_arrays(flat, type=kind)


def _flat(table: pa.Table, name: str) -> np.ndarray[Any, Any]:
    """A column of numbers. KeyError or ValueError where there is none, or it has nulls."""
    column = table.column(name)
    if column.null_count:
        raise ValueError(f"{name} has nulls")
    values: np.ndarray[Any, Any] = column.to_numpy()
    if values.dtype.kind not in "if":
        raise ValueError(f"{name} is no column of numbers")
    return values


def _matrix(table: pa.Table, name: str) -> np.ndarray[Any, Any]:
    """The values of a list column, flat."""
    flat: np.ndarray[Any, Any] = table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return flat


def _parquet(columns: Mapping[str, pa.Array], *, split: Sequence[str]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields = [pa.field(name, array.type, nullable=False) for name, array in columns.items()]
    table = pa.Table.from_arrays(list(columns.values()), schema=pa.schema(fields))
    leaves = {
        name: f"{name}.list.element" if pa.types.is_nested(array.type) else name for name, array in columns.items()
    }
    texts = [name for name, array in columns.items() if pa.types.is_dictionary(array.type)]
    sink = io.BytesIO()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        compression_level={
            leaf: HIDDEN_LEVEL if name == "hidden" else COMPRESSION_LEVEL for name, leaf in leaves.items()
        },
        use_dictionary=texts,
        use_byte_stream_split=[leaves[name] for name in split if name in leaves],
        write_statistics=False,
    )
    return sink.getvalue()


def _read(data: bytes, path: Path) -> pa.Table:
    try:
        return read_parquet(data)
    except ValueError as error:
        raise broken(path, str(error)) from error
