"""Both sides' likeliest ids at the worst positions of each candidate, gathered while a run is scored.

The worst are those with the highest KL, and those where the actual token's log-probability differs most; of one model
alone, those with the highest nll. A part's lists travel beside its scores (`with_lists`), of those rows alone that are
among the worst of the part, so that kept answers of an interrupted run hold them too. `Worst` merges the parts, in
bounded memory and whatever their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from evalgate.core import LEAST_LOGPROB
from evalgate.store.alternatives import LIST_COLUMNS, LISTED, PLACE_COLUMNS, SIDES, list_type, rows_of, schema
from evalgate.table import ROUNDING

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

KEPT = 500  # positions of a candidate, for each way to be the worst
_LARGEST_ID = (1 << 31) - 1
_RANKED = ("by_kl", "by_plain_kl", "by_step", "by_nll")  # ways to be the worst, as columns


class Likeliest(NamedTuple):
    """One side's ids [n, k] and their logprobs [n, k] in nats, logprob descending, then id ascending.

    A row's list ends before the first entry that is not one: an id below 0, a mask, or no log-probability.
    """

    ids: NDArray[np.integer]
    logprobs: NDArray[np.floating]

    @classmethod
    def of(cls, rows: Sequence[Mapping[int, float]]) -> Likeliest:
        """The likeliest of what is known at each position: id -> logprob, of any number and in any order."""
        ids = np.full((len(rows), LISTED), -1, dtype=np.int64)
        logprobs = np.full(ids.shape, -np.inf)
        for row, known in enumerate(rows):
            usable = [(token, value) for token, value in known.items() if 0 <= token <= _LARGEST_ID and value == value]
            best = sorted(usable, key=lambda entry: (-entry[1], entry[0]))[:LISTED]
            ids[row, : len(best)] = [token for token, _ in best]
            logprobs[row, : len(best)] = [value for _, value in best]
        return cls(ids, logprobs)


def with_lists(table: pa.Table, sides: Mapping[str, Likeliest | None]) -> pa.Table:
    """A part's table with LIST_COLUMNS, null but for the rows that are among the worst of each candidate.

    sides: of "ref" and "cand" what is known at each of the table's rows; None = nothing.
    """
    chosen = np.zeros(table.num_rows, dtype=np.bool_)
    chosen[_worst(table.column("candidate").to_pylist(), _places(table), _badness(table))] = True
    for side in SIDES:
        for name, values in zip(("top_ids", "top_logprobs"), _lists(sides.get(side), chosen), strict=True):
            column = f"{side}_{name}"
            table = table.append_column(column, values.cast(list_type(column)))
    return table


def without_lists(part: pa.Table) -> pa.Table:
    """The table that `with_lists` was given."""
    return part.drop_columns([name for name in LIST_COLUMNS if name in part.column_names])


class Worst:
    """The worst positions of each candidate among the parts so far; holds at most a few times KEPT rows of each."""

    def __init__(self) -> None:
        self._rows: pa.Table | None = None

    def add(self, part: pa.Table) -> None:
        """Take in a part that `with_lists` gave; one without lists says nothing."""
        import pyarrow as pa

        if LIST_COLUMNS[0] not in part.column_names:
            return
        rows = part.filter(part.column(LIST_COLUMNS[0]).is_valid())
        badness = _badness(rows)
        columns = {"candidate": rows.column("candidate").cast(pa.string())}
        columns |= {name: rows.column(name) for name in (*PLACE_COLUMNS[1:], *LIST_COLUMNS)}
        columns |= {name: pa.chunked_array([badness[:, n]]) for n, name in enumerate(_RANKED)}
        found = pa.table(columns)
        if self._rows is not None:
            found = pa.concat_tables([self._rows, found])
        badness = np.stack([found.column(name).to_numpy() for name in _RANKED], axis=1)
        self._rows = found.take(_worst(found.column("candidate").to_pylist(), _places(found), badness)).combine_chunks()

    def of(self, table: pa.Table) -> pa.Table | None:
        """The alternatives of a run with that token-score table, in its order; None where nothing is known."""
        import pyarrow as pa

        if self._rows is None:
            return None
        at = rows_of(self._rows, table)
        sizes = [np.asarray(self._rows.column(name).combine_chunks().value_lengths()) for name in LIST_COLUMNS]
        known = np.flatnonzero((at >= 0) & (np.max(sizes, axis=0) > 0))
        if not len(known):
            return None
        kept = self._rows.select(schema().names).take(pa.array(known[np.argsort(at[known])]))
        return kept.cast(schema()).combine_chunks()


def _lists(known: Likeliest | None, chosen: NDArray[np.bool_]) -> tuple[pa.Array, pa.Array]:
    """ids and logprobs as lists: of the chosen rows what is known, null elsewhere."""
    import pyarrow as pa

    if known is None:
        known = Likeliest(np.zeros((len(chosen), 0), dtype=np.int32), np.zeros((len(chosen), 0)))
    ids, logprobs = known.ids[:, :LISTED], known.logprobs[:, :LISTED]
    entries = (ids >= 0) & (logprobs > LEAST_LOGPROB) & (logprobs <= ROUNDING)
    entries = np.logical_and.accumulate(entries, axis=1) & chosen[:, None]
    offsets = pa.array(np.concatenate([[0], np.cumsum(entries.sum(axis=1))]), pa.int32())
    mask = pa.array(~chosen)
    flat = pa.array(ids[entries].astype(np.int32)), pa.array(logprobs[entries].astype(np.float32))
    return tuple(pa.ListArray.from_arrays(offsets, values, mask=mask) for values in flat)


def joined(found: Sequence[pa.Table | None], table: pa.Table) -> pa.Table | None:
    """The alternatives of several candidates of one run, in the order of its token-score table."""
    import pyarrow as pa

    known = [one for one in found if one is not None]
    if not known:
        return None
    whole = pa.concat_tables(known)
    return whole.take(pa.array(np.argsort(rows_of(whole, table)))).combine_chunks()


def stacked(parts: Sequence[Likeliest]) -> Likeliest:
    """The rows of one after the other; all of one width."""
    return Likeliest(np.concatenate([part.ids for part in parts]), np.concatenate([part.logprobs for part in parts]))


def _places(table: pa.Table) -> NDArray[np.int64]:
    """[n, 2]: window and position."""
    return np.stack([np.asarray(table.column(name), dtype=np.int64) for name in PLACE_COLUMNS[1:]], axis=1)


def _badness(table: pa.Table) -> NDArray[np.float64]:
    """[n, ways to be the worst]: higher is worse, NaN = not known."""

    def known(*names: str) -> NDArray[np.float64]:
        found = np.full(table.num_rows, np.nan)
        for name in names:
            if name in table.column_names:
                values = np.asarray(table.column(name).to_numpy(), dtype=np.float64)
                found = np.where(np.isnan(found), values, found)
        return found

    nothing = np.full(table.num_rows, np.nan)
    kl = known("kl", "kl_low")
    # Which of its two estimates a trace's KL is, all positions decide together at the end: the worst of both are kept.
    plain = known("kl_plain") if "kl_plain" in table.column_names else nothing
    step = np.abs(known("ref_nll", "ref_nll_low") - known("cand_nll", "cand_nll_low"))
    paired = not {"kl", "kl_low", "ref_nll", "ref_nll_low"}.isdisjoint(table.column_names)
    alone = nothing if paired else known("cand_nll", "cand_nll_low")
    return np.stack([kl, plain, step, alone], axis=1)


def _worst(candidates: Sequence[str], places: NDArray[np.int64], badness: NDArray[np.float64]) -> NDArray[np.int64]:
    """Ascending rows of each candidate's KEPT worst, in each way; of equally bad ones the first by window, position."""
    names = np.asarray(candidates, dtype=object)
    chosen: set[int] = set()
    for name in dict.fromkeys(candidates):
        mine = np.flatnonzero(names == name)
        for values in badness[mine].T:
            there = ~np.isnan(values)
            known = mine[there]
            order = np.lexsort((places[known, 1], places[known, 0], -values[there]))
            chosen.update(known[order[:KEPT]].tolist())
    return np.array(sorted(chosen), dtype=np.int64)
