"""The likeliest ids of both sides at the worst positions of a run: `alternatives.parquet` in its folder.

One row per candidate and kept position: rows of the token-score table, in its order. Each side has two lists of one
length, ids and their logprobs in nats: at most LISTED, the likeliest first, and of equally likely ones the smaller id.
A list is shorter, or empty, where no more is known.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from evalgate.core import LEAST_LOGPROB
from evalgate.errors import ScoreError
from evalgate.table import ROUNDING

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

LISTED = 10  # most ids of one side at one position
SIDES = ("ref", "cand")
PLACE_COLUMNS = ("candidate", "window", "position")
LIST_COLUMNS = tuple(f"{side}_{name}" for side in SIDES for name in ("top_ids", "top_logprobs"))


def schema() -> pa.Schema:
    """Arrow schema of the table: names and types of its columns, none of which may hold a null."""
    import pyarrow as pa

    kinds = {"candidate": pa.string(), "window": pa.int32(), "position": pa.int32()}
    lists = {name: list_type(name) for name in LIST_COLUMNS}
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in {**kinds, **lists}.items()])


def list_type(name: str) -> pa.DataType:
    """The Arrow type of one of LIST_COLUMNS."""
    import pyarrow as pa

    return pa.list_(pa.int32() if name.endswith("_ids") else pa.float32())


def check(found: pa.Table, table: pa.Table) -> None:
    """Check alternatives, and that their rows are rows of the token-score table, in its order.

    Raises:
        ScoreError: names what is wrong; its message ends a sentence about the alternatives.
    """
    kinds = [(field.name, field.type) for field in schema()]
    if [(field.name, field.type) for field in found.schema] != kinds:
        raise ScoreError(f"does not have the columns {', '.join(name for name, _ in kinds)}")
    empty = next((name for name in found.column_names if found.column(name).null_count), None)
    if empty is not None:
        raise ScoreError(f"has a null in column '{empty}'")
    _check_places(found, table)
    check_lists(found)


def _check_places(found: pa.Table, table: pa.Table) -> None:
    """Raise ScoreError for a row that is not one of the token-score table, or that stands out of its order."""
    import numpy as np

    at = rows_of(found, table)
    _refuse(at < 0, lambda row: f"has a position at row {row} that the token-score table does not have")
    _refuse(np.diff(at) <= 0, lambda row: f"has row {row + 1} twice or out of the token-score table's order")


def rows_of(found: pa.Table, table: pa.Table) -> NDArray[np.int64]:
    """The row of the token-score table that has the candidate, window and position of each row; -1 = none."""
    import numpy as np
    import pyarrow.compute as pc

    names = pc.unique(table.column("candidate").cast("string"))
    (owners, places), (our_owners, ours) = (_places(one, names) for one in (table, found))
    at = np.full(len(ours), -1, dtype=np.int64)
    for number in range(len(names)):
        rows, mine = np.flatnonzero(owners == number), np.flatnonzero(our_owners == number)
        rows = rows[np.argsort(places[rows], kind="stable")]
        near = rows[np.minimum(np.searchsorted(places[rows], ours[mine]), len(rows) - 1)]
        at[mine] = np.where(places[near] == ours[mine], near, -1)
    return at


def _places(table: pa.Table, names: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each row the candidate's index among the names (-1 = none of them), and window and position as one number."""
    import numpy as np
    import pyarrow.compute as pc

    owners = pc.index_in(table.column("candidate").cast("string"), value_set=names).fill_null(-1)
    window, position = (np.asarray(table.column(name), dtype=np.int64) for name in ("window", "position"))
    return np.asarray(owners, dtype=np.int64), (window << 32) + position


def check_lists(found: pa.Table) -> None:
    """Check the lists of a table that may hold other columns too, and nulls where a row has no lists.

    Raises ScoreError as `check`.
    """
    kinds = {name: found.schema.field(name).type if name in found.column_names else None for name in LIST_COLUMNS}
    wrong = next((name for name, kind in kinds.items() if kind != list_type(name)), None)
    if wrong is not None:
        raise ScoreError(f"does not have the column '{wrong}', or has it with another type")
    import numpy as np

    gaps = [np.asarray(found.column(name).is_null()) for name in LIST_COLUMNS]
    _refuse(np.logical_or.reduce(gaps) & ~np.logical_and.reduce(gaps), lambda row: f"lacks a list at row {row}")
    for side in SIDES:
        _check_side(found, side)


def _check_side(found: pa.Table, side: str) -> None:
    import numpy as np
    import pyarrow as pa

    ids, logprobs = (found.column(f"{side}_{name}").combine_chunks() for name in ("top_ids", "top_logprobs"))
    if isinstance(ids, pa.ChunkedArray):  # of a table without rows
        return
    sizes = [np.asarray(part.value_lengths().fill_null(-1), dtype=np.int64) for part in (ids, logprobs)]
    flat_ids, flat = ids.flatten(), logprobs.flatten()
    if flat_ids.null_count or flat.null_count:
        raise ScoreError(f"has a null inside a list of column '{side}_top_ids' or '{side}_top_logprobs'")
    _refuse(sizes[0] != sizes[1], lambda row: f"has lists of different lengths for '{side}' at row {row}")
    _refuse(sizes[0] > LISTED, lambda row: f"lists more than {LISTED} ids for '{side}' at row {row}")
    owner = np.repeat(np.arange(len(ids)), np.maximum(sizes[0], 0))
    token, value = np.asarray(flat_ids, dtype=np.int64), np.asarray(flat, dtype=np.float64)
    impossible = (token < 0) | ~((value > LEAST_LOGPROB) & (value <= ROUNDING))
    _refuse(impossible, lambda at: f"has an id or a logprob of '{side}' that cannot be at row {owner[at]}")
    # Of equal logprobs the ids may stand in any order: they can be equal in float32 where the model's were not.
    rises = (owner[1:] == owner[:-1]) & (value[1:] > value[:-1])
    _refuse(rises, lambda at: f"lists ids of '{side}' out of order at row {owner[at]}")
    order = np.lexsort((token, owner))
    twice = (owner[order][1:] == owner[order][:-1]) & (token[order][1:] == token[order][:-1])
    _refuse(twice, lambda at: f"lists an id of '{side}' twice at row {owner[order][at]}")


def _refuse(wrong: object, message: Callable[[int], str]) -> None:
    """Raise ScoreError for the first flag that is set."""
    import numpy as np

    at = np.flatnonzero(np.asarray(wrong))
    if len(at):
        raise ScoreError(message(int(at[0])))


def write(path: Path, found: pa.Table) -> None:
    """Write the file."""
    import pyarrow.parquet as pq

    pq.write_table(found, path, compression="zstd", use_dictionary=["candidate"])
