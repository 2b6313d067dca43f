"""Do a trace's hidden states give what was recorded? A sample of rows goes through the head, and a fault gets its name.

What the reference said of each position (the token's log-probability) was recorded from the running model, and the
digest of each row of hidden states with it. So there are two witnesses: a row that is not the one that was recorded has
another digest, and rows and head that do not belong together give other log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from evalgate.traces.batch import Float32, Float64, PositionBatch, row_digests, widened
from evalgate.traces.head import OutputHead

SAMPLE = 64  # rows of a trace that go through the head
_TOLERANCE = 5e-3  # nats: float32 products in another order are off by far less
_EXPLAINS = 0.1  # of the difference that is left where a fault's name is right


@dataclass(frozen=True)
class Fault:
    """What is wrong with hidden states, as the end of a sentence that begins with the file."""

    what: str


def check_rows(batch: PositionBatch, head: OutputHead, *, most: int) -> Fault | None:
    """What is wrong with a shard of hidden states; None where up to `most` of its rows give what was recorded."""
    if batch.hidden is None or batch.digest is None:
        return Fault("holds no hidden states")
    digests = row_digests(batch.hidden)
    strange = np.flatnonzero(digests != batch.digest)
    if len(strange):
        return _strange(batch, digests, strange, head, most)
    rows = _spread(len(batch), most)
    off = _off(batch, head, rows, widened(batch.hidden[rows]))
    if not _wrong(off, batch, rows).any():
        return None
    found = _named(batch, head, rows, off)
    where = batch.where(int(rows[int(np.argmax(off))]))
    if found is not None:
        return Fault(found)
    return Fault(
        f"gives, through the trace's output head, other log-probabilities than were recorded (by {off.max():.3g} nats "
        f"at {where}), and its rows are those that were recorded: the trace has another model's head"
    )


def _strange(
    batch: PositionBatch, digests: NDArray[np.int32], strange: NDArray[np.int64], head: OutputHead, most: int
) -> Fault:
    """Rows that are not the recorded ones."""
    recorded = batch.digest
    assert recorded is not None and batch.hidden is not None
    for step, word in ((1, "after"), (-1, "before")):
        moved = np.roll(recorded, -step)
        if (digests == moved)[strange].mean() > 0.5:
            return Fault(_shifted(word, f"{len(strange)} of {len(batch)} rows"))
    rows = strange[_spread(len(strange), most)]
    off = _off(batch, head, rows, widened(batch.hidden[rows]))
    found = _named(batch, head, rows, off)
    if found is not None:
        return Fault(found)
    return Fault(
        f"has {len(strange)} rows that are not those that were recorded, the first at {batch.where(strange[0])}"
    )


def _named(batch: PositionBatch, head: OutputHead, rows: NDArray[np.int64], off: Float64) -> str | None:
    """The fault that explains how far the rows are off; None where none does."""
    hidden = batch.hidden
    assert hidden is not None
    mine = widened(hidden[rows])
    found: dict[str, Float64] = {}
    for step, word in ((-1, "after"), (1, "before")):
        inside = rows[(rows + step >= 0) & (rows + step < len(batch))]
        same = inside[batch.window[inside + step] == batch.window[inside]]
        if len(same):
            found[_shifted(word, "rows")] = _off(batch, head, same, widened(hidden[same + step]))
    if head.norm is not None:
        norm = head.norm
        tried: dict[str, Callable[[Float64], Float64]] = {
            "holds hidden states to which the final norm was not applied": norm.apply,
            "holds hidden states to which the final norm was applied twice": norm.undo,
        }
        for what, change in tried.items():
            found[what] = _off(batch, head, rows, change(mine.astype(np.float64)).astype(np.float32))
    whole = float(np.median(off))
    best = min(found, key=lambda name: float(np.median(found[name])), default=None)
    if best is None or not float(np.median(found[best])) <= max(_TOLERANCE, _EXPLAINS * whole):
        return None
    return best


def _shifted(word: str, rows: str) -> str:
    return f"has its {rows} of hidden states shifted by one: each is that of the position {word} its own"


def _off(batch: PositionBatch, head: OutputHead, rows: NDArray[np.int64], hidden: Float32) -> Float64:
    """How far the token's log-probability is off what was recorded, [n] nats; infinite where it is not a number."""
    with np.errstate(all="ignore"):
        found = np.abs(head.nll(hidden, batch.token[rows]) + batch.logprob[rows])
    return np.where(np.isfinite(found), found, np.inf)


def _wrong(off: Float64, batch: PositionBatch, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.asarray(off > _TOLERANCE + 1e-4 * np.abs(batch.logprob[rows]))


def _spread(count: int, most: int) -> NDArray[np.int64]:
    """At most `most` of `count` rows in neighbouring pairs, evenly spread, ascending."""
    if count <= most:
        return np.arange(count)
    starts = np.linspace(0, count - 2, max(1, most // 2)).astype(np.int64)
    rows = sorted({int(row) for start in starts for row in (start, start + 1)})
    assert all(a < b for a, b in pairwise(rows))
    return np.array(rows)
