"""A trace against endpoints: what each is asked for, and what the answers say of the trace's ids.

Where all kept ids of a position came back, KL is estimated as for a model that is loaded here. Elsewhere the ids known
to both sides give a lower bound of KL and intervals of TV and JS (evalgate.traces.bounds). Nats.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from evalgate import dialects
from evalgate.core import Window
from evalgate.dialects.base import WindowScores
from evalgate.endpoints.channel import EndpointDown
from evalgate.endpoints.pool import Wanted
from evalgate.endpoints.source import EndpointSource
from evalgate.errors import EndpointError, MismatchError, ScoreError
from evalgate.measure.alternatives import Likeliest
from evalgate.measure.bounds import (
    OVERLAP_K,
    Columns,
    add_interval,
    best_ids,
    check_shared,
    known_ids,
    narrowed,
    rounded,
    side_columns,
    top1_of,
    unknown_counts,
)
from evalgate.measure.recordings.base import split_positions
from evalgate.measure.recordings.trace import RecordedTrace, estimate_columns, settle
from evalgate.traces import (
    NeededIds,
    PositionBatch,
    Shared,
    TopList,
    compare,
    js_interval,
    kl_lower,
    needed_ids,
    tv_interval,
)
from evalgate.traces.bounds import SLACK

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

MOST_VALUES = 1 << 19  # positions x ids of one SGLang reply, which scores every id at every position: about 16 MB


class TraceForEndpoints:
    """A trace as evalgate.measure.scoring.RecordedSide. named: specs of candidates that are asked for ids by name."""

    def __init__(self, recorded: RecordedTrace, named: Collection[str]) -> None:
        self._recorded = recorded
        self._named = frozenset(named)

    def wanted(self, window: Window, source: EndpointSource) -> Wanted:
        """The kept ids of each position; none where the source cannot be asked, or its reply would be too large."""
        if source.info.spec not in self._named:
            return {}
        found = kept_ids(self._recorded, window)
        if source.asked.shared_ids:
            union = {token for ids in found.values() for token in ids}
            return found if len(found) * len(union) <= MOST_VALUES else {}
        return found

    def columns(self, window: Window, source: EndpointSource, scores: WindowScores) -> Columns:
        """Wide columns of one window. Raises ScoreError or MismatchError naming window and position."""
        positions = [row.position for row in scores.rows]
        if positions != list(window.positions):
            raise MismatchError(f"window {window.index}: {source.info.spec} answered for other positions")
        batch = self._recorded.rows(window)
        needed = needed_ids(batch)
        log_q = _answers(needed, scores)
        shared = Shared(needed.log_p, np.where(np.isnan(log_q), -np.inf, log_q), needed.known & ~np.isnan(log_q))
        shared = rounded(shared, None, source.quantum)
        check_shared(window, positions, shared)
        columns = {**_reference(batch), **side_columns(scores, "cand", by_id=source.by_id, excess=source.excess)}
        tv, js = tv_interval(shared), js_interval(shared)
        columns |= {"kl_low": kl_lower(shared).tolist(), "kl_high": [None] * len(batch)}
        columns |= {"tv_low": tv.low.tolist(), "tv_high": tv.high.tolist()}
        columns |= {"js_low": js.low.tolist(), "js_high": js.high.tolist()}
        columns |= _estimates(batch, needed, log_q, _likeliest(scores), SLACK + shared.doubts[1])
        _choices(columns, batch, needed, scores, by_id=source.by_id)
        return columns

    def likeliest(self, window: Window) -> Likeliest:
        """The likeliest ids that the trace keeps at each scored position of a window."""
        batch = self._recorded.rows(window)
        return Likeliest(batch.top_ids, batch.top_logprobs)

    def finished(self, table: pa.Table) -> tuple[pa.Table, list[str]]:
        """The token-score table: estimates where a candidate has one at every position, else bounds; and notes."""
        import pyarrow as pa
        import pyarrow.compute as pc

        notes = list(self._recorded.trace.meta.notes)
        if self._recorded.trace.meta.full:
            notes.append("the whole rows of the trace were not used: an endpoint gives none to compare with them")
        notes += _bound_notes(table)
        notes += [
            f"{name} is not known at {count:,} of {table.num_rows:,} positions, which count as intervals: a larger "
            "--top-k, or a trace with more ids, knows more"
            for name, count in unknown_counts(table).items()
        ]
        table, said = settle(table)
        notes += said
        low, errors = table.column("kl_low"), table.column("kl_se")
        table = narrowed(table.drop_columns(["kl_se"]))
        if "kl_low" in table.column_names:
            table = table.drop_columns(["kl_low"])
        table = table.append_column("kl_low", low)
        if "kl" not in table.column_names:
            return table, notes
        errors = pc.if_else(table.column("kl").is_valid(), errors, pa.scalar(None, errors.type))
        table = table.append_column("kl_se", errors)
        return table, notes + self._recorded.sampling_notes(table)


def kept_ids(recorded: RecordedTrace, window: Window) -> dict[int, tuple[int, ...]]:
    """Position -> the ids that the trace keeps there (actual token, likeliest, tail samples), ascending."""
    rows = needed_ids(recorded.rows(window)).ids.tolist()
    return {p: tuple(i for i in ids if i >= 0) for p, ids in zip(window.positions, rows, strict=True)}


def naming_dialect(source: EndpointSource) -> str:
    """Another dialect that all URLs of a source honour and that gives ids by name; "" = none."""
    certificates = list(source.certificates.values())
    honoured = certificates[0].dialects if certificates else ()
    return next(
        (
            name
            for name in honoured
            if name != source.dialect
            and all(name in c.dialects and dialects.get(name).names_ids(c.capabilities()) for c in certificates)
        ),
        "",
    )


def requests_through(recorded: RecordedTrace, source: EndpointSource, dialect: str, windows: Sequence[Window]) -> int:
    """About how many requests all windows take in a dialect: those of the first one's positions, for all positions."""
    first = windows[0]
    one = replace(source, dialect=dialect).most_requests(first, kept_ids(recorded, first))
    return -(-one * sum(len(window.positions) for window in windows) // len(first.positions))


def gives_ids(recorded: RecordedTrace, source: EndpointSource, window: Window) -> bool:
    """Whether all URLs of a source give the ids they are asked for, tried at the window's first scored position.

    Our own server does. Raises EndpointDown where one does not answer at all.
    """
    if not source.certificates:
        return True
    if not source.takes_ids or source.excess:
        return False  # with an excess the estimate would be off by as much; bounds count it
    first = split_positions(window, 1)[0]
    wanted = kept_ids(recorded, first)
    for channel in source.channels:
        try:
            scores = source.score(channel, first, wanted)
        except EndpointDown:
            raise
        except (EndpointError, ScoreError):  # it is then asked for its likeliest ids, where what else is wrong shows
            return False
        if not all(score.known for row in scores.rows for score in row.wanted):
            return False
    return True


def _answers(needed: NeededIds, scores: WindowScores) -> NDArray[np.float64]:
    """The candidate's logprobs [n, L] at the needed ids; NaN where the answer does not say."""
    log_q = np.full(needed.ids.shape, np.nan)
    for at, (ids, row) in enumerate(zip(needed.ids.tolist(), scores.rows, strict=True)):
        known = known_ids(row)
        log_q[at] = [known.get(token, np.nan) for token in ids]
    return log_q


def _reference(batch: PositionBatch) -> Columns:
    return {
        "ref_nll": (-batch.logprob).tolist(),
        "ref_entropy": batch.entropy.tolist(),
        "ref_top1": batch.top1.tolist(),
        "ref_margin": batch.margin.tolist(),
        "ref_rank": batch.rank.tolist(),
    }


def _likeliest(scores: WindowScores) -> TopList:
    """The candidate's own likeliest ids, as far as it lists them; ids that it was asked for are left out."""
    width = max((len(row.top_ids) for row in scores.rows), default=0)
    ids = np.full((len(scores.rows), max(width, 1)), -1, dtype=np.int64)
    logprobs = np.full(ids.shape, -np.inf)
    for at, row in enumerate(scores.rows):
        ids[at, : len(row.top_ids)], logprobs[at, : len(row.top_ids)] = row.top_ids, row.top_logprobs
    return TopList(ids, logprobs)


def _estimates(
    batch: PositionBatch,
    needed: NeededIds,
    log_q: NDArray[np.float64],
    likeliest: TopList,
    slack: NDArray[np.float64],
) -> Columns:
    """The columns of the estimate (`estimate_columns`) where all needed ids are known."""
    rows = np.flatnonzero((~np.isnan(log_q) | ~needed.known).all(axis=1))
    pair = compare(
        batch.take(rows),
        NeededIds(needed.ids[rows], needed.log_p[rows]),
        log_q[rows],
        TopList(likeliest.ids[rows], likeliest.logprobs[rows]),
        slack=slack[rows],
    )
    columns: Columns = {}
    for name, found in estimate_columns(pair.estimate).items():
        columns[name] = [None] * len(batch)
        for row, value in zip(rows.tolist(), found.tolist(), strict=True):
            columns[name][row] = value
    return columns


def _choices(columns: Columns, batch: PositionBatch, needed: NeededIds, scores: WindowScores, *, by_id: bool) -> None:
    """Agreement, regret, overlap, and the reference's rank of the candidate's choice, as far as they are known."""
    best = [top1_of(row, by_id=by_id) for row in scores.rows]
    same = [(0.0, 1.0) if b is None else (float(a == b),) * 2 for a, b in zip(batch.top1.tolist(), best, strict=True)]
    add_interval(columns, "top1_agreement", same)
    log_p = [dict(zip(i, v, strict=True)) for i, v in zip(needed.ids.tolist(), needed.log_p.tolist(), strict=True)]
    tops = batch.top_logprobs.astype(np.float64)
    add_interval(columns, "regret", [_regret(*item) for item in zip(tops, log_p, best, strict=True)])
    lists = batch.top_ids.tolist()
    ranks = [ids.index(b) + 1 if b in ids else None for ids, b in zip(lists, best, strict=True)]
    columns["ref_rank_of_cand_top1"] = ranks
    if min(batch.top_ids.shape[1], scores.k) >= OVERLAP_K:
        theirs = [best_ids(row, by_id=by_id) for row in scores.rows]
        add_interval(columns, "topk_overlap", [_overlap(a, b) for a, b in zip(lists, theirs, strict=True)])


def _regret(top: NDArray[np.float64], log_p: dict[int, float], best: int | None) -> tuple[float, float | None]:
    """log p(argmax p) - log p(best): at least the list's depth where `best` is no kept id."""
    if best is None:
        return 0.0, None
    if best in log_p:
        cost = max(float(top[0]) - log_p[best], 0.0)
        return cost, cost
    return max(float(top[0] - top[-1]), 0.0), None


def _overlap(top_ids: Sequence[int], theirs: frozenset[int] | None) -> tuple[float, float]:
    if theirs is None:
        return 0.0, 1.0
    share = len(theirs.intersection(top_ids[:OVERLAP_K])) / OVERLAP_K
    return share, share


def _bound_notes(table: pa.Table) -> list[str]:
    """Which candidates have a lower bound alone, and why."""
    names = np.asarray(table.column("candidate").to_pylist())
    unknown = np.asarray(table.column("kl").is_null().to_numpy(), dtype=np.bool_)
    notes = []
    for name in dict.fromkeys(names.tolist()):
        count, total = int(unknown[names == name].sum()), int((names == name).sum())
        if count:
            notes.append(
                f"KL of {name} is a lower bound and no estimate: at {count:,} of {total:,} positions it did not give "
                "all ids that the trace keeps"
            )
    return notes
