"""Draws from the tail of a distribution: ids outside the top-K, i.i.d. in proportion to their probability.

By inverse CDF in two steps, so that only block sums are kept of a row: uniform numbers pick a block by the running
sum of block masses, then an id inside it. Sums are float64. Uniform numbers come from (seed, window, position) alone,
so neither batches nor the order of windows change a draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

_BLOCK = 512  # ids of one block
_CPU_ELEMENTS = 1 << 22  # exponentials in memory at once: 16 MiB
_DEVICE_ELEMENTS = 1 << 25
_DRAWS = 1 << 22  # elements of the blocks that draws fall into, in memory at once


class Tail(NamedTuple):
    """mass [rows] float64: probability of the tail; ids [rows, m] int64, -1 where the mass is exactly 0."""

    mass: torch.Tensor
    ids: torch.Tensor


def uniforms(seed: int, keys: Sequence[tuple[int, int]], m: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """[rows, m] in [0, 1): the numbers of each (window, position) under the seed."""
    drawn = [np.random.default_rng([seed, window, position]).random(m) for window, position in keys]
    return np.array(drawn, dtype=np.float64).reshape(len(keys), m)


def draw(logits: torch.Tensor, top_ids: torch.Tensor, lse: torch.Tensor, numbers: torch.Tensor) -> Tail:
    """Tail mass and draws of a tile. The logits at top_ids [rows, K] are overwritten with -inf.

    logits [rows, vocabulary] float32; top_ids in the one order, likeliest first; lse [rows] float64; numbers [rows, m]
    float64 in [0, 1).
    """
    peak = logits.gather(1, top_ids[:, -1:])  # no tail logit is larger; one 100 nats below it counts as 0
    peak = torch.where(torch.isfinite(peak), peak, torch.zeros_like(peak))
    logits.scatter_(1, top_ids, -torch.inf)
    running = _block_masses(logits, peak).cumsum_(1)
    total = running[:, -1:]
    mass = total[:, 0] * (peak[:, 0].double() - lse).exp()
    if not numbers.shape[1]:
        return Tail(mass, top_ids[:, :0])
    target = numbers * total
    block = _first_above(running, target)
    before = torch.where(block > 0, running.gather(1, (block - 1).clamp_(min=0)), 0.0)
    rest = target - before
    step = max(1, _DRAWS // (_BLOCK * logits.shape[0]))
    parts = [(block[:, low : low + step], rest[:, low : low + step]) for low in range(0, block.shape[1], step)]
    ids = torch.cat([_inside(logits, peak, *part) for part in parts], 1)
    return Tail(mass, torch.where(mass[:, None] > 0, ids, -1))


def _block_masses(logits: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    """Sum of exp(logit - peak) of each block of _BLOCK ids, [rows, blocks] float64."""
    rows, vocabulary = logits.shape
    whole = vocabulary // _BLOCK * _BLOCK
    parts = []
    elements = _CPU_ELEMENTS if logits.device.type == "cpu" else _DEVICE_ELEMENTS
    step = max(1, elements // rows // _BLOCK) * _BLOCK
    for low in range(0, whole, step):
        high = min(low + step, whole)
        weights = (logits[:, low:high] - peak).exp_()
        parts.append(weights.view(rows, -1, _BLOCK).sum(2).double())
    if whole < vocabulary:
        parts.append((logits[:, whole:] - peak).exp_().sum(1, keepdim=True).double())
    return torch.cat(parts, 1)


def _inside(logits: torch.Tensor, peak: torch.Tensor, block: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """The id in each block [rows, m] at which the running sum passes `rest` [rows, m]."""
    rows, m = block.shape
    vocabulary = logits.shape[1]
    columns = block[:, :, None] * _BLOCK + torch.arange(_BLOCK, device=logits.device)
    inside = columns < vocabulary
    picked = logits.gather(1, columns.clamp_(max=vocabulary - 1).view(rows, -1)).view(rows, m, _BLOCK)
    weights = torch.where(inside, (picked - peak[:, :, None]).exp_(), 0.0).double()
    running = weights.cumsum_(2).view(rows * m, _BLOCK)
    at = _first_above(running, rest.reshape(-1, 1)).view(rows, m)
    return block * _BLOCK + at


def _first_above(running: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Per row the first index whose running sum [rows, n] is above target [rows, m]; never one without weight.

    Rounding may leave a target at or beyond the end: it then takes the last index that has weight.
    """
    last = torch.searchsorted(running, running[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(running, target.contiguous(), right=True), last)
