"""The load-time check of the tiled runner: the same bits in every place of a tile, beside any neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from serve.engine.head import AnyHead
from serve.engine.reduce import marginal
from serve.engine.runner import Runner, Segment, UnsupportedModel
from serve.engine.tiled import SLOT_ROWS, SLOTS, TILE_ROWS, WIDE, TiledRunner


def run_alone(runner: Runner, ids: Sequence[int]) -> torch.Tensor:
    """Hidden rows [len(ids), size] of one sequence by itself, through pages of its own."""
    runner.allocate(len(ids))
    return runner.forward(ids, [Segment(0, len(ids), 0, tuple(range(len(ids))))])


def check_places(runner: Runner, head: AnyHead, ids: Sequence[int]) -> None:
    """Raise UnsupportedModel where a row's hidden state, logits or log-sum-exp depend on its place or neighbours.

    The sequence runs alone, once per slot with other tokens beside it, and token by token.
    """
    expected = run_alone(runner, ids)
    n, size = len(ids), SLOT_ROWS
    other = [ids[-1 - i] for i in range(n)]
    runner.allocate(2 * n)
    mine, theirs = tuple(range(n)), tuple(range(n, 2 * n))
    runner.forward(other, [Segment(0, n, 0, theirs)])
    for place in range(SLOTS):
        got = []
        for low in range(0, n, size):
            high = min(low + size, n)
            # `place` slots of stored rows of the other sequence, then ours, then more of the other
            tokens: list[int] = []
            segments: list[Segment] = []
            for slot in range(SLOTS):
                start = (low + slot * size) % (n - size)
                own = slot == place
                first, last = (low, high) if own else (start, start + size)
                pages = mine if own else theirs
                segments.append(Segment(len(tokens), last - first, first, pages[:last], stored=not own, total=n))
                tokens.extend((ids if own else other)[first:last])
            at = segments[place].row
            got.append(runner.forward(tokens, segments)[at : at + high - low])
        _same(torch.cat(got), expected, "hidden states")
    single = [runner.forward(ids[i : i + 1], [Segment(0, 1, i, mine[: i + 1], total=n)]) for i in range(n)]
    _same(torch.cat(single), expected, "hidden states")
    _check_head(head, expected)


def widen(runner: TiledRunner, ids: Sequence[int]) -> bool:
    """Let the runner put WIDE tiles side by side where that gives the same bits; returns whether it does.

    As many tiles as there may be, each slot with rows of the sequence that begin elsewhere, and the sequence by itself.
    """
    expected = run_alone(runner, ids)
    n, size, pages = len(ids), SLOT_ROWS, tuple(range(len(ids)))
    starts = [i * 3 % (n - size) for i in range(SLOTS * WIDE)]
    segments = [Segment(i * size, size, at, pages[: at + size], stored=True, total=n) for i, at in enumerate(starts)]
    runner.wide = WIDE
    beside = runner.forward([token for at in starts for token in ids[at : at + size]], segments)
    same = torch.equal(beside, torch.cat([expected[at : at + size] for at in starts]))
    if not (same and torch.equal(run_alone(runner, ids), expected)):
        runner.wide = 1
    return runner.wide > 1


def _check_head(head: AnyHead, hidden: torch.Tensor) -> None:
    with torch.inference_mode():
        rows = hidden[torch.arange(TILE_ROWS) % hidden.shape[0]]
        logits = head.logits(rows)
        lse = marginal(logits, 1).lse
        for shift in range(1, TILE_ROWS):
            moved = head.logits(rows.roll(shift, 0))
            _same(moved.roll(-shift, 0), logits, "logits")
            if shift in (1, 5, TILE_ROWS // 2):
                _same(marginal(moved, 1).lse.roll(-shift, 0), lse, "log-sum-exps")


def _same(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if not torch.equal(got, expected):
        raise UnsupportedModel(f"its {what} change with the place of a row in a batch on this device")
