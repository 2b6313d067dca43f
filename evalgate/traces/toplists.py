"""What two lists of likely ids can say: shared ids, top-1, overlap, and where they cannot.

A list is ids [n, k] int (-1 = no entry, only at the end) with logprobs [n, k], logprob descending. A tie that may
go on beyond the list's end leaves the answer unknown, unless the list was cut by id among equals.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evalgate.errors import UsageError
from evalgate.traces.batch import Bools, Float64
from evalgate.traces.bounds import SLACK, Shared

Ids = NDArray[np.int32] | NDArray[np.int64]


@dataclass(frozen=True)
class TopList:
    """One side's ids and logprobs.

    by_id: among equal logprobs at the cut the smaller ids were kept. contiguous: the list is the k most likely ids
    (any id outside is at most as likely as the last); False for ids that were asked for by name.
    """

    ids: Ids
    logprobs: Float64
    by_id: bool = False
    contiguous: bool = True

    @property
    def listed(self) -> Bools:
        """[n, k] flags of the entries."""
        flags: Bools = self.ids >= 0
        return flags

    @property
    def ceiling(self) -> Float64:
        """[n] the highest logprob that an unlisted id can have."""
        probs = np.where(self.listed, np.exp(np.where(self.listed, self.logprobs, 0.0)), 0.0)
        with np.errstate(divide="ignore"):
            rest: Float64 = np.log(np.maximum(1 - probs.sum(axis=1), 0.0) + SLACK)
        if not self.contiguous:
            return rest
        last: Float64 = np.where(self.listed, self.logprobs, np.inf).min(axis=1)
        lower: Float64 = np.minimum(rest, last)
        return lower


@dataclass(frozen=True)
class TopOne:
    """ids [n] int64 of the most likely token; they count only where `determined` [n]."""

    ids: NDArray[np.int64]
    determined: Bools


@dataclass(frozen=True)
class Known:
    """values [n]; they count only where `determined` [n], and `unknown` counts the others."""

    values: Float64
    determined: Bools

    @property
    def unknown(self) -> int:
        """Positions whose value the lists do not say."""
        return int(np.count_nonzero(~self.determined))


def look_up(ids: Ids, logprobs: Float64, wanted: Ids) -> tuple[Float64, Bools]:
    """Of each row's `wanted` ids [n, w] the logprob among `ids` [n, k] (-inf where absent), and whether it is there."""
    rows = np.arange(len(ids), dtype=np.int64)[:, None] << 32
    keys = np.where(ids >= 0, rows + ids, -1).reshape(-1)
    order = np.argsort(keys, kind="stable")
    targets = np.where(wanted >= 0, rows + wanted, -2)
    at = np.minimum(np.searchsorted(keys[order], targets), max(len(keys) - 1, 0))
    if not len(keys):
        return np.full(wanted.shape, -np.inf), np.zeros(wanted.shape, dtype=np.bool_)
    found = keys[order][at] == targets
    return np.where(found, logprobs.reshape(-1)[order[at]], -np.inf), found


def shared_ids(p: TopList, q: TopList) -> Shared:
    """The ids that both lists hold, as bounds read them, in p's order."""
    log_q, found = look_up(q.ids, q.logprobs, p.ids)
    return Shared(np.where(p.listed, p.logprobs, -np.inf).astype(np.float64), log_q, found)


def top1(side: TopList) -> TopOne:
    """The most likely id: of equal ones the smallest. Unknown where an unlisted id may be as likely."""
    logprobs = np.where(side.listed, side.logprobs, -np.inf)
    best = logprobs.max(axis=1)
    beyond = np.int64(np.iinfo(np.int64).max)
    ids = np.where(side.listed & (logprobs == best[:, None]), side.ids.astype(np.int64), beyond)
    tied_out = side.ceiling >= best
    cut_by_id = side.contiguous and side.by_id
    return TopOne(ids.min(axis=1), np.isfinite(best) & (~tied_out | cut_by_id))


def agreement(p: TopList, q: TopList) -> Known:
    """1.0 where both sides' top-1 is the same id, else 0.0; unknown where either is."""
    a, b = top1(p), top1(q)
    return Known((a.ids == b.ids).astype(np.float64), a.determined & b.determined)


def topk_overlap(p: TopList, q: TopList, *, k: int) -> Known:
    """|top_k(p) & top_k(q)| / k; unknown where a tie at rank k may go on beyond a list's end.

    Raises UsageError where a list is shorter than k or holds ids asked for by name.
    """
    for side in (p, q):
        if k < 1 or side.ids.shape[1] < k or not side.contiguous:
            raise UsageError(f"an overlap of {k} ids needs the {k} most likely ids of both sides: ask for more")
    (a, known_a), (b, known_b) = _best(p, k), _best(q, k)
    _, found = look_up(a, np.zeros(a.shape), b)
    return Known(found.sum(axis=1) / k, known_a & known_b)


def _best(side: TopList, k: int) -> tuple[NDArray[np.int64], Bools]:
    """Each row's k best ids, logprob descending then id ascending, and whether they are certain."""
    logprobs = np.where(side.listed, side.logprobs, -np.inf)
    order = np.lexsort((side.ids, -logprobs), axis=1)[:, :k]
    ids = np.take_along_axis(side.ids, order, axis=1).astype(np.int64)
    last = np.take_along_axis(logprobs, order[:, -1:], axis=1)[:, 0]
    return ids, np.isfinite(last) & (side.by_id | (side.ceiling < last))
