"""KL against llama.cpp's stored rows: the figure that llama.cpp prints, and what it can be at most and at least."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evalgate.errors import MismatchError, ScoreError
from evalgate.traces.batch import Float32, Float64
from evalgate.traces.bounds import Interval
from evalgate.traces.estimate import head_terms
from evalgate.traces.llamacpp_logits import LogitsRows


def llamacpp_kl(rows: LogitsRows, logits: ArrayLike) -> Float64:
    """[n] KL of the stored rows to a candidate's full logits (or logprobs) [n, V] as llama-perplexity computes it.

    sum p (log p - log q) over stored logprobs above -16, float32 terms in a float64 sum. It leaves out censored ids
    and can be slightly negative; `llamacpp_kl_interval` says what the exact KL can be.

    Raises MismatchError for another shape; ScoreError naming the row of a value that is not finite.
    """
    scores = _candidate(rows, logits)
    largest = scores.max(axis=1, keepdims=True)
    total = np.exp(scores - largest).sum(axis=1, keepdims=True, dtype=np.float64)
    normaliser = largest + np.log(total).astype(np.float32)
    p = np.exp(rows.logprobs)
    terms = p * (rows.logprobs - scores + normaliser)
    sums: Float64 = np.where(rows.logprobs > np.float32(-16), terms, np.float32(0)).sum(axis=1, dtype=np.float64)
    return sums


def llamacpp_kl_interval(rows: LogitsRows, logits: ArrayLike) -> Interval:
    """What the KL of the rows before they were stored can be, against a candidate's full logits [n, V], float64.

    Each stored logprob may be off by `rows.rounding`, and each censored id has a probability between 0 and its
    stored one, all of them together at most `rows.hidden`. Per id the term p log(p/q) - p + q is convex in p, so its
    least value is at p = q where that is allowed, and its largest at an end.

    Raises as `llamacpp_kl`.
    """
    scores = _candidate(rows, logits).astype(np.float64)
    log_q = scores - scores.max(axis=1, keepdims=True)
    log_q = log_q - np.log(np.exp(log_q).sum(axis=1, keepdims=True))
    log_p, step = rows.logprobs.astype(np.float64), rows.rounding.astype(np.float64)
    nearest = np.clip(log_q, np.where(rows.censored, -np.inf, log_p - step), log_p + step)
    low = head_terms(nearest, log_q).sum(axis=1)
    seen = ~rows.censored
    ends = np.maximum(head_terms(log_p - step, log_q), head_terms(log_p + step, log_q))
    high = np.where(seen, ends, 0.0).sum(axis=1)
    hidden = [_most_hidden(rows, row, log_q[row]) for row in range(len(log_q))]
    return Interval(low, high + np.array(hidden))


def _most_hidden(rows: LogitsRows, row: int, log_q: NDArray[np.float64]) -> float:
    """The largest sum of terms that one row's censored ids can have.

    From p = 0 (term q) to p = c, the stored probability, a term lies under its chord; the chords of steepest slope
    get the hidden mass first, c each.
    """
    q = log_q[rows.censored[row]]
    if not len(q):
        return 0.0
    at = int(np.argmax(rows.censored[row]))
    log_c = float(rows.logprobs[row, at]) + float(rows.rounding[row, at])
    c = np.exp(log_c)
    gains = np.sort(np.maximum(c * (log_c - q - 1.0), 0.0))[::-1]
    count = min(float(rows.hidden[row] / c), float(len(gains)))
    whole = int(count)
    part = gains[whole] * (count - whole) if whole < len(gains) else 0.0
    return float(np.exp(q).sum() + gains[:whole].sum() + part)


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
    return scores
