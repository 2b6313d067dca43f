"""KL against llama.cpp's stored rows: the figure that llama.cpp prints, and what it can be at most and at least."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

from evalgate.core import LEAST_LOGPROB
from evalgate.errors import MismatchError, ScoreError
from evalgate.traces.batch import Float32, Float64
from evalgate.traces.bounds import Bounds
from evalgate.traces.llamacpp_logits import LogitsRows

TILE = 1 << 14  # ids


def llamacpp_kl(rows: LogitsRows, logits: ArrayLike) -> Float64:
    """[n] KL of the stored rows to a candidate's full logits (or logprobs) [n, V] as llama-perplexity computes it.

    sum p (log p - log q) over stored logprobs above -16, float32 terms in a float64 sum. It leaves out censored ids
    and can be slightly negative; `llamacpp_kl_interval` says what the exact KL can be.

    Raises MismatchError for another shape; ScoreError naming the row of a value that is not finite or a mask.
    """
    scores = _candidate(rows, logits)
    return np.array([_row_kl(log_p, log_q) for log_p, log_q in zip(rows.logprobs, scores, strict=True)], np.float64)


def _row_kl(log_p: Float32, scores: Float32) -> float:
    largest = scores.max()
    normaliser = largest + np.float32(np.log(np.exp(scores - largest).sum(dtype=np.float64)))
    terms = np.exp(log_p) * (log_p - scores + normaliser)
    return float((terms * (log_p > np.float32(-16))).sum(dtype=np.float64))


def llamacpp_kl_interval(rows: LogitsRows, logits: ArrayLike) -> Bounds:
    """What the KL of the rows before they were stored can be, against a candidate's full logits [n, V], float64.

    Each stored logprob may be off by `rows.rounding`, and each censored id has a probability between 0 and its
    stored one, all of them together at most `rows.hidden`. Per id the term p log(p/q) - p + q is convex in p, so its
    least value is at p = q where that is allowed, and its largest at an end.

    Raises as `llamacpp_kl`.
    """
    scores = _candidate(rows, logits)
    ends = np.array([_row_interval(rows, row, logits) for row, logits in enumerate(scores)]).reshape(-1, 2)
    return Bounds(ends[:, 0], ends[:, 1])


def _row_interval(rows: LogitsRows, row: int, logits: Float32) -> tuple[float, float]:
    """One row's least and largest KL, in tiles that stay in the processor's cache; masks multiply, which is fast."""
    largest = np.float64(logits.max())
    normaliser = largest + np.log(sum(np.exp(logits[tile] - largest).sum() for tile in _tiles(len(logits))))
    low, high, gains = 0.0, 0.0, np.empty(len(logits))
    for tile in _tiles(len(logits)):
        hidden = rows.censored[row, tile].astype(np.float64)
        log_p, step = rows.logprobs[row, tile].astype(np.float64), rows.rounding[row, tile].astype(np.float64)
        log_q = logits[tile] - normaliser
        q, apart = np.exp(log_q), log_p - log_q
        at_least = np.maximum(np.exp(log_p - step) * (apart - step - 1) + q, 0.0)
        rise = np.exp(log_p + step) * (apart + step - 1)
        at_most = np.maximum(rise + q, 0.0)
        low += at_least @ ((apart > step) * (1 - hidden)) + at_most @ (apart < -step).astype(np.float64)
        high += np.maximum(at_least, at_most) @ (1 - hidden) + q @ hidden
        gains[tile] = np.maximum(rise, 0.0) * hidden
    if not rows.censored[row].any():
        return low, high
    at = int(np.argmax(rows.censored[row]))
    c = np.exp(np.float64(rows.logprobs[row, at]) + np.float64(rows.rounding[row, at]))
    return low, high + _largest(gains, float(rows.hidden[row] / c))


def _tiles(size: int) -> Iterator[slice]:
    return (slice(at, at + TILE) for at in range(0, size, TILE))


def _largest(gains: Float64, count: float) -> float:
    """The sum of the `count` largest gains, the last of them in part.

    From p = 0 (term q) to p = c, the stored probability, a censored id's term lies under its chord, which rises by
    a gain; the steepest chords get the hidden mass first, c each.
    """
    whole = int(count)
    if whole < len(gains):
        gains = np.partition(gains, len(gains) - 1 - whole)[len(gains) - 1 - whole :]
        gains[0] *= count - whole
    return float(gains.sum())


def _candidate(rows: LogitsRows, logits: ArrayLike) -> Float32:
    scores = np.asarray(logits, dtype=np.float32)
    if scores.shape != rows.logprobs.shape:
        raise MismatchError(
            f"the candidate has logits {scores.shape} and the logits file {rows.logprobs.shape} (rows, vocabulary): "
            "use the same windows and the same vocabulary"
        )
    bad = ~np.isfinite(scores).all(axis=1)
    if bad.any():
        row = int(np.argmax(bad))
        raise ScoreError(f"row {row}: a logit of the candidate is not finite: the model is broken there", row=row)
    masked = scores - scores.max(axis=1, keepdims=True) <= LEAST_LOGPROB
    bad = (masked & ~rows.censored).any(axis=1)
    if bad.any():
        row = int(np.argmax(bad))
        raise ScoreError(
            f"row {row}: the candidate masks an id that the reference finds possible: KL is infinite", row=row
        )
    return scores
