"""Documents and tables as a stranger may leave them: one thing changed at a time, with right digests around it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

VALUES = [
    None,
    True,
    -1,
    0,
    7,
    2**31,
    2**70,
    -0.5,
    1e308,
    "",
    "x",
    "../x",
    "a\0b",
    "\ud800",
    [],
    [1],
    ["x"],
    {},
    {"a": 1},
]
REMOVED = object()
COLUMNS = ("strings", "nulls", "nested", "negative", "huge", "nan", "floats", "missing", "twice", "empty")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        yield (*path, key)
        yield from places(child, (*path, key))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a path, or without it."""
    found = copy.deepcopy(document)
    at = found
    for key in path[:-1]:
        at = at[key]
    if value is REMOVED:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return found


def documents(document: Any) -> st.SearchStrategy[Any]:
    """The document with one thing replaced or removed."""
    values = st.sampled_from([*VALUES, REMOVED])
    return st.builds(changed, st.just(document), st.sampled_from(list(places(document))), values)


def tables(table: pa.Table) -> st.SearchStrategy[pa.Table]:
    """The table with one column changed."""
    return st.builds(with_column, st.just(table), st.sampled_from(table.column_names), st.sampled_from(COLUMNS))


def with_column(table: pa.Table, name: str, how: str) -> pa.Table:
    """The table with a column changed in one of the ways of COLUMNS."""
    n, at = table.num_rows, table.column_names.index(name)
    if how == "missing":
        return table.drop_columns([name])
    if how == "twice":
        return table.append_column(name, table.column(name))
    if how == "empty":
        return table.slice(0, 0)
    made = {
        "strings": pa.array(["x"] * n),
        "nulls": pa.nulls(n, table.column(name).type),
        "nested": pa.array([[1, 2]] * n),
        "negative": pa.array(np.full(n, -3, np.int32)),
        "huge": pa.array(np.full(n, 2**62)),
        "nan": pa.array(np.full(n, np.nan)),
        "floats": pa.array(np.linspace(0, 1, n)),
    }
    return table.set_column(at, name, made[how])
