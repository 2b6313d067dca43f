"""A full trace against whole rows of a candidate: every divergence exact, with what float16 rounding can have moved.

The top-K logprobs of the trace are float32 and take the place of the rounded ones; only the tail is float16.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evalgate.core import LEAST_LOGPROB
from evalgate.errors import MismatchError, ScoreError
from evalgate.traces.batch import Float32, Float64, PositionBatch
from evalgate.traces.terms import head_terms

_RELATIVE, _LEAST = 2.0**-11, 2.0**-25  # half a unit in the last place of a float16, and of its subnormals
_ROWS = 8  # float64 rows in memory at once


@dataclass(frozen=True)
class FullPair:
    """[n] float64, nats but for tv. rounding: the most that float16 rounding of the reference can have moved kl."""

    kl: Float64
    reverse_kl: Float64
    js: Float64
    tv: Float64
    regret: Float64
    rounding: Float64


def compare_full(batch: PositionBatch, logits: Float32, top1: NDArray[np.int32]) -> FullPair:
    """Divergences of a full trace's rows from a candidate's logits [n, V]; top1 [n]: the candidate's likeliest ids.

    Raises MismatchError for another shape; ScoreError where the trace is not full or a candidate's row is broken.
    """
    if batch.shifted is None:
        raise ScoreError("this trace keeps top-K and samples, not full rows: record it again with --full")
    if logits.shape != batch.shifted.shape:
        raise MismatchError(f"the candidate's rows are {logits.shape} and the trace's {batch.shifted.shape}")
    parts = []
    for low in range(0, len(batch), _ROWS):
        rows = np.arange(low, min(low + _ROWS, len(batch)))
        parts.append(_compare(batch.take(rows), logits[rows], top1[rows]))
    return FullPair(*(np.concatenate(values) for values in zip(*parts, strict=True)))


def _compare(batch: PositionBatch, logits: Float32, top1: NDArray[np.int32]) -> tuple[Float64, ...]:
    log_q = logits.astype(np.float64)
    log_q -= log_q.max(axis=1, keepdims=True)
    log_q -= np.log(np.exp(log_q).sum(axis=1, keepdims=True))
    if np.isnan(log_q).any():
        row = int(np.argmax(np.isnan(log_q).any(axis=1)))
        raise ScoreError(f"{batch.where(row)}: a logit of the candidate is not finite: the model is broken there")
    log_p = batch.full_logprobs()
    np.put_along_axis(log_p, batch.top_ids.astype(np.int64), batch.top_logprobs.astype(np.float64), axis=1)
    for names, one, other in (
        (("candidate", "reference", "KL"), log_q, log_p),
        (("reference", "candidate", "reverse KL"), log_p, log_q),
    ):
        _refuse_ruled_out(batch, names, one, other)
    p, q = np.exp(log_p), np.exp(log_q)
    middle = np.maximum((p + q) / 2, 1e-300)
    js = (_part(p, middle) + _part(q, middle)).sum(axis=1)
    best = np.take_along_axis(log_p, top1[:, None].astype(np.int64), axis=1)[:, 0]
    return (
        head_terms(log_p, log_q).sum(axis=1),
        head_terms(log_q, log_p).sum(axis=1),
        np.clip(js, 0.0, np.log(2.0)),
        np.minimum(np.abs(p - q).sum(axis=1) / 2, 1.0),
        np.maximum(batch.top_logprobs[:, 0] - best, 0.0),
        _rounding(batch, p, log_p, log_q),
    )


def _refuse_ruled_out(batch: PositionBatch, names: tuple[str, str, str], one: Float64, other: Float64) -> None:
    """Raise ScoreError at the first row where `one` is -inf or a mask for an id that `other` finds possible."""
    bad = ((one <= LEAST_LOGPROB) & (np.exp(other) > 0)).any(axis=1)
    if bad.any():
        row = int(np.argmax(bad))
        raise ScoreError(
            f"{batch.where(row)}: the {names[0]} gives no probability to an id that the {names[1]} does "
            f"(a logit is -inf or a mask): {names[2]} is infinite there",
            window=int(batch.window[row]),
            position=int(batch.position[row]),
        )


def _part(x: Float64, middle: Float64) -> Float64:
    part: Float64 = np.where(x > 0, x / 2 * np.log(np.where(x > 0, x, middle) / middle), 0.0)
    return part


def _rounding(batch: PositionBatch, p: Float64, log_p: Float64, log_q: Float64) -> Float64:
    """How far p d - p + q, d = log p - log q, can move where log p is off by e.

    By Taylor at most p exp(e) (|d| e + (1 + |d| + e) e^2 / 2), summed over the tail.
    """
    if batch.shifted is None:
        return np.zeros(len(batch))
    off = np.maximum(np.abs(batch.shifted.astype(np.float64)) * _RELATIVE, _LEAST)
    np.put_along_axis(off, batch.top_ids.astype(np.int64), 0.0, axis=1)
    seen = p > 0
    off, d = np.where(seen, off, 0.0), np.where(seen, np.abs(np.where(seen, log_p, 0.0) - log_q), 0.0)
    bound: Float64 = (p * np.exp(off) * (d * off + (1 + d + off) * off**2 / 2)).sum(axis=1)
    return bound
