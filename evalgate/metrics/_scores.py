"""One candidate's rows of the token-score table, as arrays that metrics read.

Columns are read on demand, widened to float64 or int64, and checked: a null or non-finite value in a
column that a metric needs is an error that names the candidate, the window and the position.

A table may have tens of millions of rows, so nothing here holds a second copy of a column for longer than it needs: a
column is widened a stretch of rows at a time, and the key columns keep the four bytes that they have in the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evalgate.core import LEAST_LOGPROB, Exactness
from evalgate.errors import ScoreError

if TYPE_CHECKING:
    import pyarrow as pa

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Keys = NDArray[np.int32]

_STEP = 1 << 20  # rows that are widened at once


@dataclass(frozen=True)
class Scores:
    """The scored positions of one candidate, ordered by (window, position), each pair once.

    document [n] int64 and domain [n] int32: codes into `documents` and `domains`, numbered by first appearance.
    window and position: [n] int32, as in the table.
    noise_floor: nats, at or below which a margin is a tie; None where it was not measured.
    """

    candidate: str
    table: pa.Table
    document: Integers
    documents: tuple[str, ...]
    domain: Keys
    domains: tuple[str, ...]
    window: Keys
    position: Keys
    noise_floor: float | None = None

    def __len__(self) -> int:
        return len(self.window)

    def has(self, name: str) -> bool:
        """Whether the column is there with at least one value; a column of nulls only counts as absent."""
        return name in self.table.column_names and self.table.column(name).null_count < len(self)

    def form(self, name: str) -> Exactness | None:
        """How the column `name` is known for this candidate: NAME, NAME with NAME_se, NAME_low, or not at all."""
        if self.has(name):
            return "estimated" if self.has(f"{name}_se") else "exact"
        return "bounded" if self.has(f"{name}_low") else None

    def floats(self, name: str) -> Floats:
        """The column as float64 [n].

        Raises:
            ScoreError: a value is null, NaN, infinite, or one that only a masked logit gives.
        """
        column = self._column(name)
        values = np.empty(len(column), np.float64)
        _fill(values, column)
        if not (values.min() >= LEAST_LOGPROB and values.max() <= -LEAST_LOGPROB):  # nor is NaN
            self._refuse(name, ~(np.abs(values) <= -LEAST_LOGPROB))
        return values

    def integers(self, name: str) -> Integers:
        """The column as int64 [n].

        Raises:
            ScoreError: a value is null.
        """
        column = self._column(name)
        if column.null_count:
            self._refuse(name, np.asarray(column.is_null().to_numpy(), dtype=np.bool_))
        values = np.empty(len(column), np.int64)
        _fill(values, column)
        return values

    def complete(self, name: str) -> bool:
        """Whether the column is there without a null."""
        return name in self.table.column_names and self.table.column(name).null_count == 0

    def window_starts(self) -> Integers:
        """Row index of the first position of every window, ascending."""
        changes = np.flatnonzero(self.window[1:] != self.window[:-1])
        return np.concatenate([np.zeros(1, np.int64), changes + 1])

    def where(self, row: int) -> str:
        """The row in words, for messages."""
        return f"candidate {self.candidate!r}, window {self.window[row]}, position {self.position[row]}"

    def _column(self, name: str) -> pa.ChunkedArray:
        if name not in self.table.column_names:
            raise ScoreError(
                f"the token-score table has no column {name!r}: score again with a source that gives it",
                column=name,
                candidate=self.candidate,
            )
        return self.table.column(name)

    def _refuse(self, name: str, bad: NDArray[np.bool_]) -> None:
        if not bad.any():
            return
        row = int(np.argmax(bad))
        raise ScoreError(
            f"{name} is missing, not finite or that of a masked logit at {self.where(row)} ({int(bad.sum())} such "
            "positions): score that window again or leave it out",
            column=name,
            candidate=self.candidate,
            window=int(self.window[row]),
            position=int(self.position[row]),
        )


def split_candidates(table: pa.Table, *, noise_floor: float | None = None) -> Iterator[Scores]:
    """Cut a token-score table into one `Scores` per candidate, in order of first appearance.

    Raises:
        ScoreError: no rows, a key is null, or a (window, position) occurs twice for a candidate.
    """
    table = table.unify_dictionaries()
    if not table.num_rows:
        raise ScoreError("the token-score table has no rows: nothing was scored")
    codes, names = _codes(table, "candidate")
    order = _by_appearance(codes)
    for code in order:
        rows = table if len(order) == 1 else table.filter(codes == code)
        yield _scores(rows, candidate=names[code], noise_floor=noise_floor)


def _scores(table: pa.Table, *, candidate: str, noise_floor: float | None) -> Scores:
    window, position = _key(table, "window"), _key(table, "position")
    same_window = window[1:] == window[:-1]
    in_order = (window[1:] > window[:-1]) | (same_window & (position[1:] >= position[:-1]))
    if not in_order.all():
        table = table.take(np.lexsort((position, window)))
        window, position = _key(table, "window"), _key(table, "position")
        same_window = window[1:] == window[:-1]
    document, documents = _codes_by_appearance(table, "document")
    domain, domains = _codes_by_appearance(table, "domain")
    scores = Scores(
        candidate=candidate,
        table=table,
        document=document.astype(np.int64),
        documents=documents,
        domain=domain,
        domains=domains,
        window=window,
        position=position,
        noise_floor=noise_floor,
    )
    same = same_window & (position[1:] == position[:-1])
    if same.any():
        raise ScoreError(f"the token-score table has {scores.where(int(np.argmax(same)))} twice: score again")
    return scores


def _codes_by_appearance(table: pa.Table, name: str) -> tuple[Keys, tuple[str, ...]]:
    # Codes numbered in order of first appearance, so that seeded draws do not depend on how a file was sharded.
    codes, names = _codes(table, name)
    order = _by_appearance(codes)
    renumber = np.zeros(len(names), dtype=np.int32)
    renumber[order] = np.arange(len(order))
    return renumber[codes], tuple(names[code] for code in order)


def _by_appearance(codes: Keys) -> Keys:
    """Each code [n] once, in the order in which they first appear."""
    changes = np.r_[0, np.flatnonzero(codes[1:] != codes[:-1]) + 1]  # rows of a document lie together: these are few
    present, first = np.unique(codes[changes], return_index=True)
    return np.asarray(present[np.argsort(first)], dtype=np.int32)


def _key(table: pa.Table, name: str) -> Keys:
    column = table.column(name)
    if column.null_count:
        raise ScoreError(f"the key column {name!r} of the token-score table has nulls: score again", column=name)
    values = np.empty(len(column), np.int32)
    _fill(values, column)
    return values


def _codes(table: pa.Table, name: str) -> tuple[Keys, tuple[str, ...]]:
    column = table.column(name)
    if column.null_count:
        raise ScoreError(f"the key column {name!r} of the token-score table has nulls: score again", column=name)
    if not hasattr(column.type, "value_type"):
        column = column.dictionary_encode()
    whole = column.combine_chunks()
    codes = np.asarray(whole.indices.to_numpy(zero_copy_only=False), dtype=np.int32)
    return codes, tuple(str(v) for v in whole.dictionary.to_pylist())


def _fill(out: NDArray[Any], column: pa.ChunkedArray) -> None:
    """Write a column [n] into `out` [n], in its type."""
    at = 0
    for chunk in column.chunks:
        for low in range(0, len(chunk), _STEP):
            part = chunk.slice(low, _STEP).cast(str(out.dtype)).to_numpy(zero_copy_only=False)
            out[at : at + len(part)] = part
            at += len(part)
