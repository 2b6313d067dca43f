"""Unbiased estimates of KL per position, with a standard error that says how far off they can be.

With d = log p - log q, KL(P||Q) = sum_v p (d - 1 + exp(-d)) because both sides sum to 1, and every term is at least
0. Under P the integrand is the "k3" estimator of Schulman, "Approximating KL divergence" (2020). All in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from evalgate.errors import ScoreError, UsageError
from evalgate.traces.batch import Bools, Float64, PositionBatch


@dataclass(frozen=True)
class KlEstimate:
    """kl [n] and its standard error se [n] from the tail samples alone (nats); se is 0 where no tail was sampled."""

    kl: Float64
    se: Float64


def excess(difference: Float64) -> Float64:
    """d - 1 + exp(-d) for d = log p - log q, at least 0, without cancellation near 0."""
    return np.maximum(difference + np.expm1(-difference), 0.0)


def head_terms(log_p: Float64, log_q: Float64) -> Float64:
    """p (d - 1 + exp(-d)) = p d - p + q per id, at least 0; q where p is 0. log_q is -inf only where log_p is."""
    p, q = np.exp(log_p), np.exp(log_q)
    with np.errstate(invalid="ignore"):  # -inf - -inf, replaced below
        difference = np.where(p > 0, log_p - log_q, 0.0)
    near = p * excess(np.clip(difference, -1.0, 1.0))
    return np.where(p > 0, np.where(np.abs(difference) < 1, near, np.maximum(p * difference - p + q, 0.0)), q)


def estimate_kl(batch: PositionBatch, top_logprobs: ArrayLike, tail_logprobs: ArrayLike) -> KlEstimate:
    """KL of the trace's P to a candidate Q from Q's logprobs at exactly `batch.top_ids` and `batch.tail_ids`.

    top_logprobs [n, K], tail_logprobs [n, M]; values at tail ids of -1 are not read. The head is exact, the tail is
    tail_mass * mean over the M samples, and se = tail_mass * sd / sqrt(M). No tail mass of Q is needed, save where
    P's tail is exactly empty: there the term is 1 - sum q over the head. Repeats of an id count as often as drawn.

    Raises ScoreError naming window and position where Q gives no probability to an id that P does.
    """
    log_p = batch.top_logprobs.astype(np.float64)
    log_q = _candidate(batch, top_logprobs, needed=np.isfinite(log_p), read=np.ones(log_p.shape, dtype=np.bool_))
    head = head_terms(log_p, log_q).sum(axis=1)
    m = batch.tail_ids.shape[1]
    if not m:
        return KlEstimate(head, np.zeros(len(batch)))
    drawn = batch.tail_ids >= 0
    tail_p = np.where(drawn, batch.tail_logprobs, 0.0).astype(np.float64)
    tail_q = np.where(drawn, _candidate(batch, tail_logprobs, needed=drawn, read=drawn), 0.0)
    terms = excess(tail_p - tail_q)
    mass = batch.tail_mass.astype(np.float64)
    left = np.maximum(1.0 - np.exp(log_q).sum(axis=1), 0.0)
    tail = np.where(mass > 0, mass * terms.mean(axis=1), left)
    return KlEstimate(head + tail, mass * terms.std(axis=1, ddof=1) / np.sqrt(m))


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


def _candidate(batch: PositionBatch, logprobs: ArrayLike, *, needed: Bools, read: Bools) -> Float64:
    """Q's logprobs as float64: finite where `needed`, not NaN where `read`."""
    values = np.asarray(logprobs, dtype=np.float64)
    if values.shape != needed.shape:
        raise ScoreError(f"the candidate's logprobs have shape {values.shape}: give one per kept id, {needed.shape}")
    bad = (needed & ~np.isfinite(values)) | (read & np.isnan(values))
    if bad.any():
        row = int(np.argmax(bad.any(axis=1)))
        raise ScoreError(
            f"{batch.where(row)}: the candidate gives no probability to an id that the reference does: KL is infinite "
            "there, or the score is missing",
            window=int(batch.window[row]),
            position=int(batch.position[row]),
        )
    return values
