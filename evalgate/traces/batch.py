"""The rows of a trace: what the reference said at each position, as arrays."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evalgate.core import LEAST_LOGPROB
from evalgate.errors import ScoreError

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Bools = NDArray[np.bool_]

MASS_SLACK = 1e-4  # how far the probabilities of one float32 row may be from 1
LEAST_TAIL_LOGPROB = -700.0  # nats; below it exp() leaves float64


@dataclass(frozen=True)
class PositionBatch:
    """n positions of a reference P, K most likely ids and M tail samples each.

    window, position, token, bytes [n] int32: the key columns of core.KEY_COLUMNS. logprob [n] float32: of the
    actual token. rank [n] int32, 1 = most likely. entropy [n] float32. top_ids [n, K] int32 and top_logprobs
    [n, K] float32: logit descending, then id ascending (different logits may round to one float32 logprob).
    tail_mass [n] float32: probability of every id that is not in top_ids. tail_ids [n, M] int32 and tail_logprobs
    [n, M] float32: drawn i.i.d. from P restricted to the tail (an id may repeat); -1 and -inf where tail_mass is
    exactly 0. M is 0 only where K is the whole vocabulary. shifted [n, V] float16 and lse [n] float64, only in a
    full trace: logit minus the row's largest logit, and log sum exp of the unrounded differences, so that
    logprob = shifted - lse (see `full_logprobs`). hidden [n, size] and digest [n] int32, only in a trace of hidden
    states: what the output head multiplies, float32, float16, or the bits of bfloat16 as uint16, and the low half of
    each row's xxh3-64.
    All in nats.
    """

    window: Int32
    position: Int32
    token: Int32
    bytes: Int32
    logprob: Float32
    rank: Int32
    entropy: Float32
    top_ids: Int32
    top_logprobs: Float32
    tail_mass: Float32
    tail_ids: Int32
    tail_logprobs: Float32
    shifted: NDArray[np.float16] | None = None
    lse: Float64 | None = None
    hidden: NDArray[Any] | None = None
    digest: Int32 | None = None

    def __len__(self) -> int:
        return len(self.window)

    @property
    def margin(self) -> Float32:
        """[n] top-1 minus top-2 logprob; K must be at least 2."""
        margins: Float32 = self.top_logprobs[:, 0] - self.top_logprobs[:, 1]
        return margins

    @property
    def top1(self) -> Int32:
        """[n] the most likely id."""
        return self.top_ids[:, 0]

    def where(self, row: int) -> str:
        """The row in words, for messages."""
        return f"window {self.window[row]}, position {self.position[row]}"

    def take(self, rows: NDArray[np.int64] | Bools) -> PositionBatch:
        """The named rows (indices or flags), in that order."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: v[rows] for name, v in values.items() if v is not None})

    def full_logprobs(self) -> Float64:
        """[n, V] float64 logprobs of a full trace.

        A value x below the row's largest is off by up to 2**-11 * |x| (float16 rounding). Differences under
        -65504 are -inf: censored. Because lse is exact, 1 - sum exp() is what rounding and censoring moved.

        Raises ScoreError where the trace is not full.
        """
        if self.shifted is None or self.lse is None:
            raise ScoreError("this trace keeps top-K and samples, not full rows: record it again with --full")
        return self.shifted.astype(np.float64) - self.lse[:, None]


def concatenate(batches: list[PositionBatch]) -> PositionBatch:
    """All rows of several batches of the same kind (same K, M, fullness), in order."""
    first = batches[0]
    names = [f.name for f in fields(first) if getattr(first, f.name) is not None]
    return replace(first, **{name: np.concatenate([getattr(b, name) for b in batches]) for name in names})


def hidden_kind(dtype: str) -> np.dtype[Any]:
    """The numpy type that holds hidden states of a dtype: numpy has no bfloat16, so its bits stand for it."""
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def widened(hidden: NDArray[Any]) -> Float32:
    """Rows of hidden states as float32; uint16 are the bits of bfloat16."""
    if hidden.dtype == np.uint16:
        return (hidden.astype(np.uint32) << 16).view(np.float32)
    return hidden.astype(np.float32)


def row_digests(hidden: NDArray[Any]) -> Int32:
    """[n] the low half of each row's xxh3-64."""
    from xxhash import xxh3_64_intdigest

    found = [xxh3_64_intdigest(row.tobytes()) & 0xFFFFFFFF for row in hidden]
    return np.array(found, dtype=np.uint32).view(np.int32)


def check_batch(
    batch: PositionBatch,
    *,
    vocab_size: int,
    top_k: int,
    tail_samples: int,
    full: bool,
    hidden: tuple[int, str] | None = None,
) -> None:
    """Refuse rows that cannot be what a reference said. hidden: size and dtype of hidden states, None = there are none.

    Raises ScoreError that names the first such window and position: shapes, types, ids outside the vocabulary or
    twice, wrong order, a value that is not finite, masses that do not add up, ranks that contradict the list.
    """
    _check_shapes(batch, vocab_size, top_k, tail_samples, full, hidden)
    if not len(batch):
        return
    _check_token(batch, vocab_size)
    _check_top(batch, vocab_size)
    _check_tail(batch, vocab_size)
    if batch.hidden is not None:
        bad = ~np.isfinite(widened(batch.hidden)).all(axis=1)
        _refuse(batch, bad, "a hidden state is not finite")
    if batch.shifted is not None and batch.lse is not None:
        bad = np.isnan(batch.shifted).any(axis=1) | (batch.shifted > 0).any(axis=1) | ~np.isfinite(batch.lse)
        _refuse(batch, bad, "a full row is not finite or not shifted by its largest logit")


def _check_shapes(
    batch: PositionBatch,
    vocab_size: int,
    top_k: int,
    tail_samples: int,
    full: bool,
    hidden: tuple[int, str] | None,
) -> None:
    n = len(batch)
    if (hidden is None) == (batch.hidden is not None and batch.digest is not None):
        raise ScoreError("the trace and the batch differ in whether they hold hidden states")
    wide = {"top_ids": top_k, "top_logprobs": top_k, "tail_ids": tail_samples, "tail_logprobs": tail_samples}
    if full != (batch.shifted is not None and batch.lse is not None):
        raise ScoreError(f"the trace is {'' if full else 'not '}full and the batch is not: give or drop shifted, lse")
    for f in fields(batch):
        values = getattr(batch, f.name)
        if values is None:
            continue
        shape = (n, wide[f.name]) if f.name in wide else (n, vocab_size) if f.name == "shifted" else (n,)
        kind = _DTYPES.get(f.name, np.dtype(np.int32))
        if f.name == "hidden" and hidden is not None:
            shape, kind = (n, hidden[0]), hidden_kind(hidden[1])
        if values.shape != shape or values.dtype != kind:
            raise ScoreError(f"{f.name} is {values.dtype} {values.shape} and must be {kind} {shape}")


_DTYPES = {
    **dict.fromkeys(("logprob", "entropy", "top_logprobs", "tail_mass", "tail_logprobs"), np.dtype(np.float32)),
    "shifted": np.dtype(np.float16),
    "lse": np.dtype(np.float64),
}


def _check_token(batch: PositionBatch, vocab_size: int) -> None:
    _refuse(batch, (batch.token < 0) | (batch.token >= vocab_size), "the token id is outside the vocabulary")
    _refuse(batch, (batch.position < 1) | (batch.bytes < 0), "a position starts at 1 and bytes at 0")
    logprob = batch.logprob
    _refuse(batch, ~((logprob > LEAST_LOGPROB) & (logprob <= MASS_SLACK)), "the token's logprob is not one")
    _refuse(batch, (batch.rank < 1) | (batch.rank > vocab_size), "the rank is outside 1..vocabulary")
    _refuse(
        batch,
        ~np.isfinite(batch.entropy) | (batch.entropy < -MASS_SLACK) | (batch.entropy > np.log(vocab_size) + MASS_SLACK),
        "the entropy is outside 0..ln(vocabulary)",
    )
    k = batch.top_ids.shape[1]
    listed = batch.rank <= k
    at_rank = np.take_along_axis(batch.top_ids, np.minimum(batch.rank, k)[:, None] - 1, axis=1)[:, 0]
    among = (batch.top_ids == batch.token[:, None]).any(axis=1)
    _refuse(batch, (among ^ listed) | (listed & (at_rank != batch.token)), "rank and top ids contradict each other")


def _check_top(batch: PositionBatch, vocab_size: int) -> None:
    ids, logprobs = batch.top_ids, batch.top_logprobs
    _refuse(batch, ((ids < 0) | (ids >= vocab_size)).any(axis=1), "a top id is outside the vocabulary")
    _refuse(batch, (np.diff(np.sort(ids, axis=1), axis=1) == 0).any(axis=1), "a top id is listed twice")
    wrong = ~((logprobs > LEAST_LOGPROB) | np.isneginf(logprobs)) | (logprobs > MASS_SLACK)
    _refuse(batch, np.logical_or(wrong.any(axis=1), ~np.isfinite(logprobs[:, 0])), "a top logprob is not one")
    higher = logprobs[:, 1:] > logprobs[:, :-1]
    _refuse(batch, higher.any(axis=1), "top ids are not ordered by logprob")


def _check_tail(batch: PositionBatch, vocab_size: int) -> None:
    mass = batch.tail_mass
    _refuse(batch, ~np.isfinite(mass) | (mass < 0), "the tail mass is negative or not finite")
    total = np.exp(batch.top_logprobs.astype(np.float64)).sum(axis=1) + mass
    _refuse(batch, np.abs(total - 1) > MASS_SLACK, "top probabilities and tail mass do not add up to 1")
    empty = mass == 0
    ids, logprobs = batch.tail_ids, batch.tail_logprobs
    if not ids.shape[1]:
        if batch.hidden is None:
            _refuse(batch, mass > MASS_SLACK, "there is a tail and no sample of it")
        return
    _refuse(batch, empty & ((ids != -1) | (logprobs != -np.inf)).any(axis=1), "an empty tail has samples")
    _refuse(batch, ~empty & ((ids < 0) | (ids >= vocab_size)).any(axis=1), "a tail id is outside the vocabulary")
    ceiling = batch.top_logprobs[:, -1:]
    out = ~(np.isfinite(logprobs) & (logprobs <= ceiling) & (logprobs > LEAST_TAIL_LOGPROB))
    _refuse(batch, ~empty & out.any(axis=1), "a tail sample is likelier than the top list's end, or not finite")
    both = np.sort(np.concatenate([batch.top_ids, ids], axis=1), axis=1)
    repeats = (np.diff(both, axis=1) == 0).sum(axis=1)
    own = (np.diff(np.sort(ids, axis=1), axis=1) == 0).sum(axis=1)
    _refuse(batch, ~empty & (repeats != own), "a tail sample is in the top list")


def _refuse(batch: PositionBatch, bad: ArrayLike, what: str) -> None:
    if np.any(bad):
        row = int(np.argmax(bad))
        raise ScoreError(
            f"{batch.where(row)}: {what}: record that window again",
            window=int(batch.window[row]),
            position=int(batch.position[row]),
        )
