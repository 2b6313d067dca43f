"""Unbiased estimates of KL per position, with a standard error that says how far off they can be.

With d = log p - log q, and S the kept ids, R all others, p_R and q_R their masses: sum_S p d is exact, and p_R mean(d)
over draws from R is unbiased for the rest. That is the plain estimate. Where q nearly agrees with p its error is of
first order in d and its value of second, so exp(-d) = q / p serves as a control variate: its mean is known because q's
mass is. The corrected estimate adds p_R mean(exp(-d)) - q_R, which has mean 0. Its terms d - 1 + exp(-d) are those of
the "k3" estimator (Schulman, "Approximating KL divergence", 2020).

Draws from P miss an id that q likes and p does not. The corrected estimate is then far too small, and so is its spread.
Three things guard against it, none of which lets a draw decide about itself, so that the estimate stays unbiased:

- J, ids outside S that q certainly likes better than p does, are known from the candidate's own list. They are left out
  of the control variate, and their mass out of q_R.
- Each fold of a position's draws is corrected only where the other draws account for q's mass, and agree better with
  the correction than without it.
- `settled`: each position keeps its correction only where that holds for all other positions together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from evalgate.core import LEAST_LOGPROB
from evalgate.errors import ScoreError, UsageError
from evalgate.traces.batch import MASS_SLACK, Bools, Float64, PositionBatch
from evalgate.traces.bounds import SLACK
from evalgate.traces.terms import excess, head_terms
from evalgate.traces.toplists import TopList, look_up

SURPLUS = 2.0  # times the most that p can be: from here on q / p is better left out of the control variate
_FOLDS = 16  # of one position's draws
_FEWEST_DRAWS = 4  # from which a position's other draws can judge
_UNSEEN = 4.0  # standard errors of one position's other draws, by which they may miss q's mass
_POOLED_UNSEEN = 4.0  # the same of all other positions
_NOISIER = 2.0  # times the squared errors without the correction


@dataclass(frozen=True)
class KlEstimate:
    """Of each position [n], nats: kl with the correction where its draws support one, and plain without any.

    se and plain_se are their standard errors from the draws alone, 0 where nothing was drawn. A single value may be
    below 0: cutting it off would bias the mean. rare: what one draw of an id in J would move the value by, where none
    was drawn.
    """

    kl: Float64
    se: Float64
    plain: Float64
    plain_se: Float64
    rare: Float64


@dataclass(frozen=True)
class Settled:
    """What to report: kl and se [n], and whether each position is `plain` [n] for what the others show."""

    kl: Float64
    se: Float64
    plain: Bools


def estimate_kl(
    batch: PositionBatch,
    top_logprobs: ArrayLike,
    tail_logprobs: ArrayLike,
    likeliest: TopList | None = None,
    *,
    slack: ArrayLike = SLACK,
) -> KlEstimate:
    """KL of the trace's P to a candidate Q from Q's logprobs at exactly `batch.top_ids` and `batch.tail_ids`.

    top_logprobs [n, K], tail_logprobs [n, M]; values at tail ids of -1 are not read. likeliest: Q's own likeliest ids,
    as many as are known; they must not depend on what was drawn. slack: what rounding may move Q's mass by, one number
    or [n]. Repeats of an id count as often as drawn. Where P's tail is exactly empty its term is 1 - sum q over the
    kept ids. From one draw a position, the term itself stands for its spread.

    Raises ScoreError naming window and position where Q gives no probability to an id that P does, and where there is a
    tail and no draw of it.
    """
    log_p = batch.top_logprobs.astype(np.float64)
    log_q = _candidate(batch, top_logprobs, needed=np.isfinite(log_p), read=np.ones(log_p.shape, dtype=np.bool_))
    head, left = head_terms(log_p, log_q).sum(axis=1), np.maximum(1.0 - np.exp(log_q).sum(axis=1), 0.0)
    m = batch.tail_ids.shape[1]
    if not m:
        _refuse_undrawn(batch)
        nothing = np.zeros(len(batch))
        return KlEstimate(head, nothing, head, nothing, nothing)
    drawn = batch.tail_ids >= 0
    tail_p = np.where(drawn, batch.tail_logprobs, 0.0).astype(np.float64)
    tail_q = np.where(drawn, _candidate(batch, tail_logprobs, needed=drawn, read=drawn), 0.0)
    difference, mass = tail_p - tail_q, batch.tail_mass.astype(np.float64)[:, None]
    ids, surplus = surplus_ids(batch, likeliest)
    outside = ~look_up(ids, np.zeros(ids.shape), batch.tail_ids)[1]
    ratio = np.where(outside, np.exp(np.where(outside, -difference, 0.0)), 0.0)
    plain = mass * (difference - 1) + left[:, None]
    corrected = mass * np.where(outside, excess(difference), difference - 1) + surplus[:, None]
    helps = _correction_helps(difference, ratio, np.maximum(left - surplus, 0.0), mass[:, 0], np.asarray(slack))
    some = mass[:, 0] > 0
    kl, se = _mean(np.where(helps, corrected, plain), some, left)
    plain_kl, plain_se = _mean(plain, some, left)
    rare = np.where(some & outside.all(axis=1), _one_hit(mass[:, 0], surplus, m), 0.0)
    return KlEstimate(head + kl, se, head + plain_kl, plain_se, rare)


def surplus_ids(
    batch: PositionBatch, likeliest: TopList | None
) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.int64]], Float64]:
    """J: ids [n, k] (-1 = none) that Q likes and P did not keep, and Q's mass of them [n].

    P gives an id that it did not keep at most the least kept probability, and at most the tail's mass. Q gives those of
    J more than twice that, so that q / p is above 2 at each of them, whatever p is.
    """
    if likeliest is None or not likeliest.ids.shape[1]:
        return np.full((len(batch), 1), -1), np.zeros(len(batch))
    ceiling = batch.tail_mass.astype(np.float64)
    if batch.top_ids.shape[1]:
        ceiling = np.minimum(ceiling, np.exp(batch.top_logprobs[:, -1].astype(np.float64)))
    q = np.where(likeliest.listed, np.exp(np.where(likeliest.listed, likeliest.logprobs, 0.0)), 0.0)
    kept = look_up(batch.top_ids, np.zeros(batch.top_ids.shape), likeliest.ids.astype(np.int64))[1]
    chosen = likeliest.listed & ~kept & (q > SURPLUS * ceiling[:, None])
    return np.where(chosen, likeliest.ids, -1).astype(np.int64), np.where(chosen, q, 0.0).sum(axis=1)


def settled(estimate: KlEstimate) -> Settled:
    """The estimate of each position, chosen by all others together: corrected, or plain where they speak against it.

    Their corrections have mean 0 where the draws saw all of Q's mass. They speak against it where their mean is more
    than 4 of its standard errors away from 0, and where the correction makes the errors larger. A position is never
    judged by its own draws, so that the choice biases nothing.
    """
    gap = estimate.plain - estimate.kl
    others = max(len(gap) - 1, 1)
    total, squares = gap.sum() - gap, np.maximum(np.square(gap).sum() - np.square(gap), 0.0)
    unseen = np.abs(total) > np.maximum(_POOLED_UNSEEN * np.sqrt(squares), SLACK * others)
    errors, plain_errors = (np.square(se).sum() - np.square(se) for se in (estimate.se, estimate.plain_se))
    plain: Bools = unseen | (errors > _NOISIER * plain_errors)
    # Of the ids in J no more is known than that all draws together hit none: they may as well have hit one.
    rare = np.square(estimate.rare) / max(np.count_nonzero(estimate.rare), 1)
    kl, se = np.where(plain, (estimate.plain, estimate.plain_se), (estimate.kl, estimate.se))
    return Settled(kl, np.sqrt(np.square(se) + rare), plain)


def chosen_token_terms(log_p: ArrayLike, log_q: ArrayLike) -> Float64:
    """r - 1 - ln r for r = q(t)/p(t) [n]: their mean is an unbiased estimate of KL(P||Q), each at least 0.

    Only for tokens t sampled from P at temperature 1 with no truncation; their spread is the sampling error.

    Raises ScoreError naming the first token whose logprobs are not finite.
    """
    p, q = np.asarray(log_p, dtype=np.float64), np.asarray(log_q, dtype=np.float64)
    bad = ~(np.isfinite(p) & np.isfinite(q))
    if p.shape != q.shape or bad.any():
        at = f"token {int(np.argmax(bad))} has a logprob that is not finite" if bad.any() else "the lengths differ"
        raise ScoreError(f"the chosen-token estimate needs both logprobs of every token: {at}")
    return excess(p - q)


def mean_standard_error(se: ArrayLike) -> float:
    """Standard error of a mean of n estimates whose own errors are independent: sqrt(sum se**2) / n.

    It speaks of the tail samples only and belongs beside the document-clustered error, which speaks of the text
    (and already contains it in expectation).

    Raises UsageError for no estimate.
    """
    values = np.asarray(se, dtype=np.float64)
    if not values.size:
        raise UsageError("a mean of no position has no standard error: estimate at least one")
    return float(np.sqrt(np.sum(values**2)) / values.size)


def _correction_helps(difference: Float64, ratio: Float64, want: Float64, mass: Float64, slack: ArrayLike) -> Bools:
    """[n, M]: whether to correct each draw, by what the draws outside its fold say; True where too few can say.

    ratio: exp(-d), 0 in J. want [n]: Q's mass outside S and J, which p_R mean(ratio) must come to.
    """
    n, m = difference.shape
    helps = np.ones((n, m), dtype=np.bool_)
    if m < _FEWEST_DRAWS:
        return helps
    fold = np.arange(m) % min(m, _FOLDS)
    for number in range(fold.max() + 1):
        mine = fold == number
        d, w = difference[:, ~mine], ratio[:, ~mine]
        error = mass * w.std(axis=1, ddof=1) / np.sqrt(w.shape[1])
        least = mass / w.shape[1]  # the weight of one draw: what less than that many draws can miss
        seen = np.abs(want - mass * w.mean(axis=1)) <= _UNSEEN * error + least + slack
        steadier = (d + w).std(axis=1) <= d.std(axis=1) + 1e-12  # equal draws differ by rounding alone
        helps[:, mine] = (seen & steadier)[:, None]
    return helps


def _one_hit(mass: Float64, surplus: Float64, m: int) -> Float64:
    """|p_R (d - 1) / M| of an id with Q's mass `surplus` that P draws once in M times; 0 without surplus."""
    some = (mass > 0) & (surplus > 0)
    distance = np.log(np.where(some, np.maximum(surplus * m, mass), 1.0) / np.where(some, mass, 1.0))
    return np.where(some, mass * (1 + distance) / m, 0.0)


def _mean(terms: Float64, some: Bools, left: Float64) -> tuple[Float64, Float64]:
    """Mean and standard error of each row's terms [n, M]; `left` without an error where there is no tail at all."""
    m = terms.shape[1]
    se = np.abs(terms[:, 0]) if m == 1 else terms.std(axis=1, ddof=1) / np.sqrt(m)
    return np.where(some, terms.mean(axis=1), left), np.where(some, se, 0.0)


def _refuse_undrawn(batch: PositionBatch) -> None:
    bad = batch.tail_mass > MASS_SLACK
    if bad.any():
        row = int(np.argmax(bad))
        raise ScoreError(
            f"{batch.where(row)}: the kept ids leave {batch.tail_mass[row]:.2g} of the reference's probability, and "
            "nothing was drawn of it: record again with at least one tail sample",
            window=int(batch.window[row]),
            position=int(batch.position[row]),
        )


def _candidate(batch: PositionBatch, logprobs: ArrayLike, *, needed: Bools, read: Bools) -> Float64:
    """Q's logprobs as float64: finite where `needed`, not NaN where `read`."""
    values = np.asarray(logprobs, dtype=np.float64)
    if values.shape != needed.shape:
        raise ScoreError(f"the candidate's logprobs have shape {values.shape}: give one per kept id, {needed.shape}")
    bad = (needed & ~(np.isfinite(values) & (values > LEAST_LOGPROB))) | (read & np.isnan(values))
    if bad.any():
        row = int(np.argmax(bad.any(axis=1)))
        raise ScoreError(
            f"{batch.where(row)}: the candidate gives no probability to an id that the reference does: KL is infinite "
            "there, or the score is missing",
            window=int(batch.window[row]),
            position=int(batch.position[row]),
        )
    return values
