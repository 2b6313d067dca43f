"""A candidate against a trace: which ids it must be asked for, and what its answers say."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evalgate.core import LEAST_LOGPROB
from evalgate.errors import ScoreError, UsageError
from evalgate.traces.batch import Bools, Float64, PositionBatch
from evalgate.traces.bounds import SLACK, WORST_EXCESS, Shared, js_interval, kl_lower, tv_interval
from evalgate.traces.estimate import KlEstimate, estimate_kl
from evalgate.traces.toplists import TopList, look_up, top1


@dataclass(frozen=True)
class NeededIds:
    """Each position's ids, distinct and ascending, [n, L] int32 padded with -1; P's logprobs [n, L], -inf there."""

    ids: NDArray[np.int32]
    log_p: Float64

    @property
    def known(self) -> Bools:
        """[n, L] flags of the entries that are ids."""
        flags: Bools = self.ids >= 0
        return flags


@dataclass(frozen=True)
class TracePair:
    """Per position [n], float64, nats; names as in the token-score table.

    kl is estimated, with kl_se from the tail samples; kl_low is a certain lower bound and kl has no upper one. A single
    kl may lie below its bound, or below 0: its mean is unbiased because it is not cut off.
    tv and js are intervals. nll: of the candidate. top1, regret: of the candidate's most likely id; they and
    agreement count only where `determined` (elsewhere an id that was not asked for may be as likely). reverse_kl
    cannot be told from samples of P and is not given.
    """

    nll: Float64
    estimate: KlEstimate
    kl_low: Float64
    tv_low: Float64
    tv_high: Float64
    js_low: Float64
    js_high: Float64
    top1: NDArray[np.int64]
    agreement: Float64
    regret: Float64
    determined: Bools

    @property
    def kl(self) -> Float64:
        """[n] the estimate, each position by its own draws alone; `settled` lets all of them decide."""
        return self.estimate.kl

    @property
    def kl_se(self) -> Float64:
        """[n] the standard error of `kl`."""
        return self.estimate.se


def needed_ids(batch: PositionBatch) -> NeededIds:
    """What a candidate must be asked for: the actual token, the top ids and the tail samples of each position."""
    ids = np.concatenate([batch.token[:, None], batch.top_ids, batch.tail_ids], axis=1).astype(np.int64)
    logprobs = np.concatenate([batch.logprob[:, None], batch.top_logprobs, batch.tail_logprobs], axis=1)
    beyond = np.iinfo(np.int32).max
    ids[ids < 0] = beyond
    order = np.argsort(ids, axis=1, kind="stable")
    ids, logprobs = np.take_along_axis(ids, order, axis=1), np.take_along_axis(logprobs, order, axis=1)
    ids[:, 1:][ids[:, 1:] == ids[:, :-1]] = beyond
    order = np.argsort(ids, axis=1, kind="stable")
    ids, logprobs = np.take_along_axis(ids, order, axis=1), np.take_along_axis(logprobs, order, axis=1)
    width = int((ids != beyond).sum(axis=1).max(initial=0))
    ids, logprobs = ids[:, :width], logprobs[:, :width].astype(np.float64)
    absent = ids == beyond
    return NeededIds(np.where(absent, -1, ids).astype(np.int32), np.where(absent, -np.inf, logprobs))


def compare(
    batch: PositionBatch,
    needed: NeededIds,
    log_q: ArrayLike,
    likeliest: TopList | None = None,
    *,
    slack: ArrayLike = SLACK,
) -> TracePair:
    """The pair's figures from the candidate's logprobs [n, L] at `needed.ids`; values at padding are not read.

    likeliest: the candidate's own likeliest ids, which no draw of the trace may have chosen. They make the estimate of
    KL steadier where the candidate likes what the reference does not (see `estimate_kl`, also for `slack`).

    Raises ScoreError naming window and position where a logprob is missing, not finite, positive, a mask (below
    LEAST_LOGPROB), or the answers of one position add up to more than 1; UsageError where the batch keeps no ids.
    """
    if not batch.top_ids.shape[1]:
        raise UsageError("this batch keeps no likeliest ids, which agreement needs: keep 1 or more, or use estimate_kl")
    values = np.asarray(log_q, dtype=np.float64)
    if values.shape != needed.ids.shape:
        raise ScoreError(f"the candidate's logprobs have shape {values.shape}: give one per id, {needed.ids.shape}")
    _check(batch, needed, values)
    values = np.where(needed.known, values, -np.inf)
    shared = Shared(needed.log_p, values, needed.known)
    estimate = estimate_kl(
        batch,
        look_up(needed.ids, values, batch.top_ids)[0],
        look_up(needed.ids, values, batch.tail_ids)[0],
        likeliest,
        slack=slack,
    )
    tv, js = tv_interval(shared), js_interval(shared)
    best = top1(TopList(needed.ids, values, contiguous=False))
    log_p_of_best = look_up(needed.ids, needed.log_p, best.ids[:, None])[0][:, 0]
    return TracePair(
        nll=-look_up(needed.ids, values, batch.token[:, None])[0][:, 0],
        estimate=estimate,
        kl_low=kl_lower(shared),
        tv_low=tv.low,
        tv_high=tv.high,
        js_low=js.low,
        js_high=js.high,
        top1=best.ids,
        agreement=(best.ids == batch.top1).astype(np.float64),
        regret=np.maximum(batch.top_logprobs[:, 0] - log_p_of_best, 0.0),
        determined=best.determined,
    )


def _check(batch: PositionBatch, needed: NeededIds, values: Float64) -> None:
    certain = needed.known & (np.isfinite(needed.log_p))
    missing = (certain & ~(np.isfinite(values) & (values > LEAST_LOGPROB))) | (needed.known & np.isnan(values))
    positive = needed.known & (values > WORST_EXCESS)
    total = np.exp(np.where(needed.known & ~positive & ~missing, values, -np.inf)).sum(axis=1)
    for bad, what in (
        (missing, "gives no logprob, or that of a mask, to an asked id"),
        (positive, "gives a logprob above 0"),
        (total[:, None] > 1 + WORST_EXCESS, "gives asked ids more than 1 in sum: ask for raw logprobs"),
    ):
        if bad.any():
            row = int(np.argmax(bad.any(axis=1)))
            named = f" (id {int(needed.ids[row, int(np.argmax(bad[row]))])})" if bad.shape[1] > 1 else ""
            raise ScoreError(
                f"{batch.where(row)}: the candidate {what}{named}",
                window=int(batch.window[row]),
                position=int(batch.position[row]),
            )
