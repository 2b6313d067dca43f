"""Full rows to what a trace keeps: exact top-K, tail mass, seeded tail samples, entropy, rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evalgate.core import LEAST_LOGPROB, Window
from evalgate.errors import ScoreError, UsageError
from evalgate.traces.batch import Float64, PositionBatch


def condense(
    logits: ArrayLike,
    places: Sequence[tuple[Window, int]],
    *,
    top_k: int = 64,
    tail_samples: int = 16,
    seed: int = 0,
    full: bool = False,
) -> PositionBatch:
    """The rows of a trace from full logits (or logprobs) [n, V], in float64.

    places: the window and position that each row predicts. Draws are seeded by (seed, window index, position), so
    batching does not change them. A logit may be -inf or a mask (probability 0) unless it is the actual token's. top_k
    may be 0: then everything is drawn, and only `estimate_kl` can read it, for a trace keeps at least 2 ids.

    Raises ScoreError naming the window and position of a NaN, +inf, or actual token without probability; UsageError
    where ids outside the top_k are left and none of them is to be drawn.
    """
    rows = np.asarray(logits)
    if rows.ndim != 2 or len(rows) != len(places):
        raise ScoreError(f"{len(places)} positions came with logits of shape {rows.shape}: give one row a position")
    if top_k < 0 or tail_samples < 0:
        raise UsageError(f"top_k is {top_k} and tail_samples {tail_samples}: give 0 or more of each")
    k = min(top_k, rows.shape[1])
    if k < rows.shape[1] and not tail_samples:
        raise UsageError(
            f"top_k is {top_k} and tail_samples 0, which leaves the other {rows.shape[1] - k} ids out: draw 1 or more "
            "(16 is usual), or keep them all"
        )
    kept = [_condense_row(row, *place, k, tail_samples, seed, full) for row, place in zip(rows, places, strict=True)]
    window = np.array([w.index for w, _ in places], np.int32)
    position = np.array([i for _, i in places], np.int32)

    def column(name: str, kind: type[np.generic]) -> NDArray[np.generic]:
        return np.array([row[name] for row in kept], dtype=kind)

    return PositionBatch(
        window=window,
        position=position,
        token=np.array([w.ids[i] for w, i in places], np.int32),
        bytes=np.array([w.bytes_per_token[i] for w, i in places], np.int32),
        **{n: column(n, np.float32) for n in ("logprob", "entropy", "tail_mass", "top_logprobs", "tail_logprobs")},  # type: ignore[arg-type]
        **{n: column(n, np.int32) for n in ("rank", "top_ids", "tail_ids")},  # type: ignore[arg-type]
        shifted=column("shifted", np.float16) if full else None,  # type: ignore[arg-type]
        lse=column("lse", np.float64) if full else None,  # type: ignore[arg-type]
    )


def top_order(row: NDArray[np.floating], k: int) -> NDArray[np.int64]:
    """The k best ids of a row [V]: value descending, then id ascending."""
    if not k:
        return np.zeros(0, dtype=np.int64)
    cut = np.partition(row, len(row) - k)[len(row) - k]
    above = np.flatnonzero(row > cut)
    ids = np.concatenate([above, np.flatnonzero(row == cut)[: k - len(above)]])
    ordered: NDArray[np.int64] = ids[np.lexsort((ids, -row[ids]))]
    return ordered


def draw_tail(logprobs: Float64, top_ids: NDArray[np.int64], m: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """m ids drawn i.i.d. from softmax(logprobs) [V] restricted to the ids outside top_ids; its mass must not be 0."""
    weights = logprobs.copy()
    weights[top_ids] = -np.inf
    total = np.cumsum(np.exp(weights - weights.max()))
    last = int(np.searchsorted(total, total[-1]))  # the last id with weight: rounding may not step over it
    drawn: NDArray[np.int64] = np.minimum(np.searchsorted(total, rng.random(m) * total[-1], side="right"), last)
    return drawn


def _condense_row(
    row: NDArray[np.floating], window: Window, position: int, k: int, m: int, seed: int, full: bool
) -> dict[str, object]:
    token = window.ids[position]
    if np.isnan(row).any() or not np.isfinite(row.max()) or not np.isfinite(row[token]):
        raise _broken(window, position, "a logit is not finite")
    shifted = row.astype(np.float64) - row.max()
    exps = np.exp(shifted)
    lse = np.log(exps.sum())
    logprobs = shifted - lse
    if logprobs[token] <= LEAST_LOGPROB:
        raise _broken(window, position, f"the actual token's logit is a mask (log-probability {logprobs[token]:.3g})")
    logprobs[logprobs <= LEAST_LOGPROB] = -np.inf
    probs = exps / exps.sum()
    top = top_order(row, k)
    tail = probs.copy()
    tail[top] = 0.0
    tail_mass = np.float32(tail.sum())
    drawn = np.full(m, -1, np.int64)
    if tail_mass > 0 and m:
        drawn = draw_tail(logprobs, top, m, np.random.default_rng([seed, window.index, position]))
    kept: dict[str, object] = {
        "logprob": logprobs[token],
        "entropy": -np.sum(probs * np.where(probs > 0, logprobs, 0.0)),
        "rank": 1 + np.count_nonzero(row > row[token]) + np.count_nonzero(row[:token] == row[token]),
        "top_ids": top,
        "top_logprobs": logprobs[top],
        "tail_mass": tail_mass,
        "tail_ids": drawn,
        "tail_logprobs": np.where(drawn >= 0, logprobs[drawn], -np.inf),
    }
    if full:
        with np.errstate(over="ignore"):  # under -65504 a difference is censored to -inf
            kept |= {"shifted": shifted.astype(np.float16), "lse": lse}
    return kept


def _broken(window: Window, position: int, what: str) -> ScoreError:
    return ScoreError(
        f"window {window.index}, position {position}: {what}: the model or its file is broken there",
        window=window.index,
        position=position,
    )
