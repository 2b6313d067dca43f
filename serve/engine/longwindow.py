"""Windows that are longer than a forward: chunk by chunk through one layer, before any goes on to the next.

So the keys and values of one layer are in memory at a time, and a window takes memory for its hidden states and for one
chunk of a layer: it grows with the window and the width of the model, and never with the vocabulary or the number of
layers. Each chunk gives the bits that it gives in a forward by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from serve.engine.attention import KVPages, Stored
from serve.engine.layerwise import Forward, LayerByLayer, snapshot, stages_of
from serve.engine.runner import Segment
from serve.models.stream import layer_paths


def long_rows(runner: Any, model: Any, window: Any, ids: Sequence[int], step: int) -> torch.Tensor:
    """Hidden rows that predict the scored positions of one window, [positions, size].

    runner: a packed one over `model`. ids: of the window that are shown. step: tokens of a chunk.
    """
    kv = KVPages(len(ids))
    layers = [model.get_submodule(path) for path in layer_paths(model)]
    before = snapshot(runner)
    try:
        passes = LayerByLayer(stages_of(layers, kv.drop), snapshot=lambda: snapshot(runner))
        return torch.cat(passes.run(picked(long_forwards(runner, ids, step, kv), [window], step)))
    finally:
        before()  # the pages of the server are the runner's again


def long_forwards(runner: Any, ids: Sequence[int], step: int, kv: KVPages) -> list[Forward]:
    """The forwards of a long sequence's chunks, `step` tokens each, whose keys and values go through `kv`."""
    pages = range(len(ids))

    def chunk(low: int, high: int) -> Forward:
        def run() -> torch.Tensor:
            runner.context.stored = Stored(kv, runner.context.stored.token_bytes)
            segment = Segment(0, high - low, low, tuple(pages[:high]), total=len(ids))
            found: torch.Tensor = runner.forward(ids[low:high], [segment])
            return found

        return run

    return [chunk(low, min(low + step, len(ids))) for low in range(0, len(ids), step)]


def picked(forwards: Sequence[Forward], batch: Sequence[Any], step: int) -> list[Forward]:
    """Forwards that keep only the rows that predict a scored position.

    Either one forward is the whole batch of windows, or the batch is one window and each forward a chunk of it.
    """
    if len(forwards) == 1:
        return [_of_batch(forwards[0], batch)]
    return [_of_chunk(forward, batch[0], number * step) for number, forward in enumerate(forwards)]


def _of_batch(forward: Forward, batch: Sequence[Any]) -> Forward:
    def run() -> torch.Tensor:
        hidden = forward()
        rows, base = [], 0
        for window in batch:
            rows += [base + p - 1 for p in window.positions]
            base += min(len(window.ids), hidden.shape[0] - base)
        return hidden[rows]

    return run


def _of_chunk(forward: Forward, window: Any, low: int) -> Forward:
    def run() -> torch.Tensor:
        hidden = forward()
        return hidden[[p - 1 - low for p in window.positions if low <= p - 1 < low + hidden.shape[0]]]

    return run
