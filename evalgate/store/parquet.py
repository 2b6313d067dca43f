"""Parquet files that others may have written, read whole and validated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


def read_parquet(content: bytes | Path) -> pa.Table:
    """The table of a Parquet file, whatever its folder is called.

    Raises:
        ValueError: it is not Parquet, or its columns are damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Not pq.read_table: it takes a folder named seed=1 on the way for a column of the table.
        with pq.ParquetFile(pa.BufferReader(content) if isinstance(content, bytes) else content) as file:
            table = file.read()
        table.validate(full=True)
        table = table.unify_dictionaries()  # of row groups; whoever does it later has both tables in memory
        pa.default_memory_pool().release_unused()  # what was decompressed into: half as much again as the table
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"is not readable Parquet ({error})") from error
    return table
