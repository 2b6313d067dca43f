"""What a token-score table may hold, checked before anything is made of it: its columns, their types and ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evalgate.errors import ScoreError
from evalgate.table import KEY_COLUMNS, RANGES, TEXT_COLUMNS, Range, column_type

if TYPE_CHECKING:
    import pyarrow as pa

_ERROR = "_se"
_ERRORS = Range(0.0, np.inf)
_STEP = 1 << 20  # rows that are widened to float64 at once: a table may have tens of millions


def check_columns(table: pa.Table, metrics: Mapping[str, Range]) -> None:
    """Check a token-score table against the ranges of its columns: `table.RANGES`, and those of the metrics.

    A column that nobody knows is not looked at. Rows are counted from 0.

    Raises:
        ScoreError: a key column is missing, a column has another type, or holds what it cannot; names column and row.
    """
    missing = [name for name in KEY_COLUMNS if name not in table.column_names]
    if missing:
        raise ScoreError(f"has no column {missing[0]!r}", column=missing[0])
    twice = {name for name in table.column_names if table.column_names.count(name) > 1}
    if twice:
        raise ScoreError(f"has the column {min(twice)!r} twice", column=min(twice))
    for name in table.column_names:
        if name in TEXT_COLUMNS:
            _check_text(name, table.column(name))
            continue
        allowed = _range_of(name, {**metrics, **RANGES})
        if allowed is not None:
            _check_range(name, table, allowed)
    for low in [name for name in table.column_names if name.endswith("_low")]:
        _check_ends(table, low, f"{low.removesuffix('_low')}_high")


def _range_of(name: str, ranges: Mapping[str, Range]) -> Range | None:
    """The range of a column; None for one that nobody knows."""
    base = name.removeprefix("ref_").removeprefix("cand_")
    for known in (name, base, base.removesuffix("_low"), base.removesuffix("_high")):
        if known in ranges:
            return ranges[known]
    return _ERRORS if base.removesuffix(_ERROR) in ranges else None


def _check_text(name: str, column: pa.ChunkedArray) -> None:
    import pyarrow as pa

    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise ScoreError(f"has numbers where the column {name!r} holds names ({column.type})", column=name)
    if column.null_count:
        _refuse(name, _nulls(column), "nothing", "names")


def _check_range(name: str, table: pa.Table, allowed: Range) -> None:
    column = table.column(name)
    if column.type != column_type(name):
        raise ScoreError(f"has {column.type} where the column {name!r} holds {column_type(name)}", column=name)
    if name in KEY_COLUMNS and column.null_count:
        _refuse(name, _nulls(column), "nothing", str(allowed))
    low, high = _as_float32(allowed)
    # An estimate from samples is not clamped: a single one may lie where the value itself cannot.
    errors = f"{name}{_ERROR}"
    loose = ~_nulls(table.column(errors)) if errors in table.column_names else None
    odd: list[_Odd] = []
    for start in range(0, table.num_rows, _STEP):
        part = column.slice(start, _STEP)
        values = np.asarray(part.cast("float64").fill_null(0.0).to_numpy(), dtype=np.float64)
        inside = (values >= low) & (values <= high)
        if allowed.whole:
            inside &= values == np.floor(values)
        if loose is not None:
            inside |= loose[start : start + _STEP]
        bad = ~(inside & np.isfinite(values)) & ~_nulls(part)
        if bad.any():
            odd.append(_Odd(start, bad, f"{values[int(np.argmax(bad))]:g}"))
    if odd:
        _refuse_all(name, odd, str(allowed))


def _nulls(column: pa.ChunkedArray) -> NDArray[np.bool_]:
    return np.asarray(column.is_null().to_numpy(), dtype=np.bool_)


def _as_float32(allowed: Range) -> tuple[float, float]:
    """The ends as a float32 column may hold them: one that float32 lacks (ln 2) may be rounded outward."""
    low, high = np.float32(allowed.low), np.float32(allowed.high)
    exact = (float(low) == allowed.low, float(high) == allowed.high)
    return (
        float(low if exact[0] else np.nextafter(low, np.float32(-np.inf))),
        float(high if exact[1] else np.nextafter(high, np.float32(np.inf))),
    )


def _check_ends(table: pa.Table, low: str, high: str) -> None:
    if high not in table.column_names:
        return
    odd: list[_Odd] = []
    for start in range(0, table.num_rows, _STEP):
        lower, upper = (
            np.asarray(table.column(name).slice(start, _STEP).cast("float64").fill_null(absent).to_numpy())
            for name, absent in ((low, -np.inf), (high, np.inf))
        )
        crossed = lower > upper
        if crossed.any():
            row = int(np.argmax(crossed))
            odd.append(_Odd(start, crossed, f"{lower[row]:g}", f"at most {high}, {upper[row]:g}"))
    if odd:
        _refuse_all(low, odd, odd[0].allowed)


@dataclass(frozen=True)
class _Odd:
    """Rows of a stretch that hold what they cannot. start: the stretch's first row. found: what the first one holds."""

    start: int
    bad: NDArray[np.bool_]
    found: str
    allowed: str = ""


def _refuse(name: str, bad: NDArray[np.bool_], found: str, allowed: str) -> None:
    _refuse_all(name, [_Odd(0, bad, found)], allowed)


def _refuse_all(name: str, odd: Sequence[_Odd], allowed: str) -> None:
    row, count = odd[0].start + int(np.argmax(odd[0].bad)), sum(int(one.bad.sum()) for one in odd)
    more = f" ({count:,} such rows)" if count > 1 else ""
    raise ScoreError(
        f"has {odd[0].found} in column {name!r} at row {row}{more}, which holds {allowed}", column=name, row=row
    )
