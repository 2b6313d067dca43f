"""Answers of two sources about one window -> rows of the token-score table, with intervals where only those are known.

A row is first made wide: NAME where a value is known, NAME_low and NAME_high everywhere (null = unbounded). Once
the run is complete `narrowed` keeps, for each candidate, NAME where it is known at every position and the
interval elsewhere, so that an unknown is never averaged away. Formulas: evalgate.traces.bounds. Nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from evalgate.core import Window
from evalgate.dialects.base import PositionScore, WindowScores
from evalgate.errors import MismatchError, ScoreError
from evalgate.probe.quantum import Quantum
from evalgate.table import KEY_COLUMNS, build
from evalgate.traces.bounds import Shared, js_interval, kl_lower, tv_interval
from evalgate.traces.toplists import TopList, shared_ids

if TYPE_CHECKING:
    import pyarrow as pa

OVERLAP_K = 10
_SIDE = ("nll", "top1", "margin", "rank")

Columns = dict[str, list[Any]]


def pair_columns(
    window: Window,
    ref: WindowScores,
    cand: WindowScores,
    *,
    by_id: tuple[bool, bool],
    quanta: tuple[Quantum | None, Quantum | None] = (None, None),
) -> Columns:
    """Wide pair and side columns of one window, one value per answered position, ascending.

    by_id: whether reference and candidate order equal logprobs by ascending id. quanta: the grids that their
    logprobs are rounded to, None = finer than float32: intervals hold for whatever the rounding hid.
    Raises ScoreError, naming window and position, where logprobs are not those of one distribution.
    """
    if [r.position for r in ref.rows] != [r.position for r in cand.rows]:
        raise MismatchError(f"window {window.index}: reference and candidate answered for other positions")
    sides = (_top_list(ref, by_id=by_id[0]), _top_list(cand, by_id=by_id[1]))
    shared = rounded(shared_ids(*sides), *quanta)
    check_shared(window, [row.position for row in ref.rows], shared)
    tv, js = tv_interval(shared), js_interval(shared)
    columns = {**_side(ref, "ref", by_id[0], quanta[0]), **_side(cand, "cand", by_id[1], quanta[1])}
    columns["kl_low"] = [float(v) for v in kl_lower(shared)]
    columns["kl_high"] = [None] * len(ref.rows)
    for name, found in (("tv", tv), ("js", js)):
        columns[f"{name}_low"], columns[f"{name}_high"] = found.low.tolist(), found.high.tolist()
    add_interval(columns, "top1_agreement", [_agreement(a, b, by_id) for a, b in zip(ref.rows, cand.rows, strict=True)])
    add_interval(columns, "regret", [_regret(a, b, by_id, quanta[0]) for a, b in zip(ref.rows, cand.rows, strict=True)])
    if min(ref.k, cand.k) >= OVERLAP_K:
        add_interval(columns, "topk_overlap", [_overlap(a, b, by_id) for a, b in zip(ref.rows, cand.rows, strict=True)])
    return columns


def rounded(shared: Shared, ref: Quantum | None, cand: Quantum | None) -> Shared:
    """The same logprobs with what rounding to the sides' grids may have moved them by."""
    off_p = None if ref is None else ref.doubts(shared.log_p)
    off_q = None if cand is None else cand.doubts(shared.log_q)
    return replace(shared, off_p=off_p, off_q=off_q)


def check_shared(window: Window, positions: Sequence[int], shared: Shared) -> None:
    """Raise ScoreError, naming window and position, where logprobs are not those of one distribution."""
    try:
        shared.check()
    except ScoreError as error:
        row = error.context.get("row")
        position = positions[row] if isinstance(row, int) else None
        raise ScoreError(
            f"window {window.index}, position {position}: {error.message}", window=window.index, position=position
        ) from None


def _side(scores: WindowScores, side: str, by_id: bool, quantum: Quantum | None) -> Columns:
    return side_columns(scores, side, by_id=by_id, excess=0.0 if quantum is None else quantum.excess)


def side_columns(scores: WindowScores, side: str, *, by_id: bool, excess: float = 0.0) -> Columns:
    """Wide columns of one side: nll with its interval, top1, margin and rank where they are known.

    excess: nats by which the side's logprobs may be too high; an nll is then an interval.
    """
    columns: Columns = {f"{side}_{name}": [] for name in (*_SIDE, "nll_low", "nll_high")}
    for row in scores.rows:
        chosen = row.chosen
        columns[f"{side}_nll"].append(-chosen.low if chosen.known and not excess else None)
        columns[f"{side}_nll_low"].append(-chosen.high)
        columns[f"{side}_nll_high"].append(excess - chosen.low if np.isfinite(chosen.low) else None)
        best = top1_of(row, by_id=by_id)
        columns[f"{side}_top1"].append(best)
        known = best is not None and len(row.top_logprobs) > 1 and not row.unmatched
        columns[f"{side}_margin"].append(row.top_logprobs[0] - row.top_logprobs[1] if known else None)
        columns[f"{side}_rank"].append(row.rank)
    return columns


def top1_of(row: PositionScore, *, by_id: bool) -> int | None:
    """The most likely id; None where the answer does not say, a tie that may go on beyond the list included."""
    best = row.top1
    tied_to_the_end = bool(row.top_logprobs) and row.top_logprobs[0] == row.top_logprobs[-1]
    return None if best is None or (tied_to_the_end and not by_id and row.tail > 0) else best


def tv_width(ref: PositionScore, cand: PositionScore, k: int) -> float:
    """Width of the TV interval had both sides listed k ids: the smaller of the two masses that are left."""
    mine, theirs = known_ids(ref), known_ids(cand)
    named = {*ref.top_ids[:k], *cand.top_ids[:k], ref.chosen.token}
    shared = [token for token in named if token in mine and token in theirs]
    masses = (sum(float(np.exp(side[token])) for token in shared) for side in (mine, theirs))
    return max(0.0, min(1.0 - mass for mass in masses))


def wide_table(window: Window, by_candidate: dict[str, Columns]) -> pa.Table:
    """The wide rows of one window, candidate after candidate; a column that a candidate lacks is null for it.

    Raises ScoreError for a NaN.
    """
    columns: Columns = {}
    for name in dict.fromkeys(name for found in by_candidate.values() for name in found):
        nothing = [None] * len(window.positions)
        columns[name] = [value for found in by_candidate.values() for value in found.get(name, nothing)]
        if any(isinstance(v, float) and v != v for v in columns[name]):
            raise ScoreError(f"window {window.index}: {name} is not a number", window=window.index)
    return build(list(by_candidate), [window], columns)


def narrowed(table: pa.Table) -> pa.Table:
    """Of each candidate NAME where it is complete, else NAME_low and NAME_high; columns left empty are dropped."""
    import pyarrow as pa
    import pyarrow.compute as pc

    candidate = table.column("candidate")
    for name in _bounded_names(table):
        low, high = f"{name}_low", f"{name}_high"
        exact = table.column(name) if name in table.column_names else pa.nulls(table.num_rows, pa.float32())
        complete = pa.chunked_array([pa.nulls(table.num_rows, pa.bool_())])
        for one in pc.unique(candidate).to_pylist():
            mine = pc.equal(candidate, one)
            whole = pc.filter(exact, mine).null_count == 0
            complete = pc.if_else(mine, pa.scalar(whole), complete)
        nothing = pa.scalar(None, pa.float32())
        table = _put(table, name, pc.if_else(complete, exact, nothing))
        table = _put(table, low, pc.if_else(complete, nothing, table.column(low)))
        table = _put(table, high, pc.if_else(complete, nothing, table.column(high)))
    for name in ("ref_top1", "cand_top1", "ref_margin", "cand_margin", "ref_rank", "cand_rank"):
        if name in table.column_names and table.column(name).null_count:
            table = _put(table, name, pa.nulls(table.num_rows, table.schema.field(name).type))
    kept = [n for n in table.column_names if n in KEY_COLUMNS or table.column(n).null_count < table.num_rows]
    return table.select(kept)


def unknown_counts(table: pa.Table) -> dict[str, int]:
    """NAME -> positions (over all candidates) where a wide table does not know it; 0 left out."""
    names = [n for n in ("ref_nll", "cand_nll", "top1_agreement", "regret", "topk_overlap") if n in table.column_names]
    return {name: table.column(name).null_count for name in names if table.column(name).null_count}


def _bounded_names(table: pa.Table) -> list[str]:
    return [n.removesuffix("_low") for n in table.column_names if n.endswith("_low")]


def _put(table: pa.Table, name: str, values: Any) -> pa.Table:
    if name in table.column_names:
        return table.set_column(table.column_names.index(name), name, values)
    return table.append_column(name, values)


def add_interval(columns: Columns, name: str, found: Sequence[tuple[float, float | None]]) -> None:
    """NAME, NAME_low and NAME_high from (low, high) pairs; equal ends are a known value."""
    columns[name] = [low if low == high else None for low, high in found]
    columns[f"{name}_low"] = [low for low, _ in found]
    columns[f"{name}_high"] = [high for _, high in found]


def known_ids(row: PositionScore) -> dict[int, float]:
    """id -> logprob of everything that the answer says for certain about one position."""
    known = dict(zip(row.top_ids, row.top_logprobs, strict=True))
    for score in (row.chosen, *row.wanted):
        if score.known:
            known.setdefault(score.token, score.low)
    return known


def _top_list(scores: WindowScores, *, by_id: bool) -> TopList:
    """Everything known, ordered, padded with -1."""
    listed = [sorted(known_ids(row).items(), key=lambda item: (-item[1], item[0])) for row in scores.rows]
    width = max((len(items) for items in listed), default=0)
    ids = np.full((len(listed), max(width, 1)), -1, dtype=np.int64)
    logprobs = np.full(ids.shape, -np.inf)
    for i, items in enumerate(listed):
        ids[i, : len(items)] = [token for token, _ in items]
        logprobs[i, : len(items)] = [value for _, value in items]
    return TopList(ids, logprobs, by_id=by_id, contiguous=False)


def _agreement(ref: PositionScore, cand: PositionScore, by_id: tuple[bool, bool]) -> tuple[float, float]:
    a, b = top1_of(ref, by_id=by_id[0]), top1_of(cand, by_id=by_id[1])
    if a is None or b is None:
        return 0.0, 1.0
    return (1.0, 1.0) if a == b else (0.0, 0.0)


def _regret(
    ref: PositionScore, cand: PositionScore, by_id: tuple[bool, bool], quantum: Quantum | None
) -> tuple[float, float | None]:
    """log p(argmax p) - log p(argmax q); an id outside the reference's list costs at least the list's depth.

    That least cost is certain, so it counts the rounding of both ends.
    """
    best, other = top1_of(ref, by_id=by_id[0]), top1_of(cand, by_id=by_id[1])
    if best is None or other is None:
        return 0.0, None
    known = known_ids(ref)
    if other in known:
        cost = max(known[best] - known[other], 0.0)
        return cost, cost
    if ref.merged or ref.unmatched:
        return 0.0, None
    ends = (ref.top_logprobs[0], ref.top_logprobs[-1])
    off = None if quantum is None else quantum.rounding(ends)
    return max(ends[0] - ends[1] - (0.0 if off is None else float(off.sum())), 0.0), None


def _overlap(ref: PositionScore, cand: PositionScore, by_id: tuple[bool, bool]) -> tuple[float, float]:
    """|top_k(p) & top_k(q)| / k for k = OVERLAP_K; unknown where a tie at rank k may go on beyond a list."""
    best = (best_ids(ref, by_id=by_id[0]), best_ids(cand, by_id=by_id[1]))
    if best[0] is None or best[1] is None:
        return 0.0, 1.0
    share = len(best[0] & best[1]) / OVERLAP_K
    return share, share


def best_ids(row: PositionScore, *, by_id: bool) -> frozenset[int] | None:
    """The OVERLAP_K likeliest ids; None where the answer does not say, as where a tie may go on beyond the list."""
    values = row.top_logprobs
    if row.merged or row.unmatched or row.sentinels or len(values) < OVERLAP_K:
        return None
    tied_to_the_end = values[OVERLAP_K - 1] == values[-1]
    return None if tied_to_the_end and not by_id and row.tail > 0 else frozenset(row.top_ids[:OVERLAP_K])
