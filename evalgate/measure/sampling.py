"""A seeded sample of positions, stratified by document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from evalgate.core import Window
from evalgate.errors import UsageError


def sample_positions(windows: Sequence[Window], count: int, *, seed: int) -> tuple[Window, ...]:
    """The windows with `count` of their positions left, as masks; windows without one are left out.

    Each document keeps its share of the positions (largest remainders first), so that means over the sample
    weigh documents as means over all positions do; within a document they are drawn without replacement.
    Raises UsageError for a count below 1.
    """
    if count < 1:
        raise UsageError(f"--positions {count} leaves nothing to measure: sample at least 1 position")
    places: dict[str, list[tuple[int, int]]] = {}
    for number, window in enumerate(windows):
        places.setdefault(window.document, []).extend((number, p) for p in window.positions)
    total = sum(map(len, places.values()))
    if count >= total:
        return tuple(windows)
    quotas = _shares({name: len(found) for name, found in places.items()}, count)
    random = np.random.default_rng(seed)
    chosen: dict[int, set[int]] = {}
    for name, found in places.items():
        for i in random.choice(len(found), size=quotas[name], replace=False):
            number, position = found[int(i)]
            chosen.setdefault(number, set()).add(position)
    return tuple(_masked(windows[number], chosen[number]) for number in sorted(chosen))


def _shares(sizes: dict[str, int], count: int) -> dict[str, int]:
    """`count` split in proportion to the sizes; what rounding leaves goes to the largest remainders, first come."""
    total = sum(sizes.values())
    whole = {name: count * size // total for name, size in sizes.items()}
    remainders = sorted(sizes, key=lambda name: -(count * sizes[name] % total))
    for name in remainders[: count - sum(whole.values())]:
        whole[name] += 1
    return whole


def _masked(window: Window, positions: set[int]) -> Window:
    first, last = min(positions), max(positions)
    mask = tuple(p in positions for p in range(first, last + 1))
    return replace(window, score_from=first, score_to=last + 1, mask=mask)
