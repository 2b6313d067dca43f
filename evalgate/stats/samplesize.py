"""How many documents a verdict takes: a pilot's documents, drawn again and judged by the rule that will judge."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from evalgate.errors import UsageError

Integers = NDArray[np.int64]

MOST_DOCUMENTS = 100_000
_DRAWS = 400
_CLEAR = 3.0  # standard errors from the power asked for, beyond which no more draws are needed
_FINE = 1.03  # the search ends where the bracket is this narrow


def documents_needed(
    decided: Callable[[Integers], bool], *, pilot: int, power: float, seed: int, draws: int = _DRAWS
) -> int | None:
    """The fewest documents that give a verdict with the chance `power`, if others are like the pilot's.

    decided: whether documents, as indices [n] into the pilot's, give it. The pilot is one of many that could have been
    drawn: two thirds of it are drawn again first, so that the chance counts what it may be wrong about. None: not with
    MOST_DOCUMENTS either.

    Raises:
        UsageError: power is not in (0, 1), or the pilot has no document.
    """
    if not 0 < power < 1:
        raise UsageError(f"power must be between 0 and 1, not {power}", power=power)
    if pilot < 1:
        raise UsageError("a pilot needs documents: measure a run first")

    # Fewer than the pilot has: drawn again whole, a few skewed documents vary less than the pilot did.
    kept = -(-2 * pilot // 3)

    def enough(count: int) -> bool:
        # The same seed for every count, so that counts are compared on like draws.
        rng = np.random.default_rng([seed, 1])
        hits = 0
        for done in range(1, draws + 1):
            another = rng.integers(0, pilot, kept)
            hits += decided(another[rng.integers(0, kept, count)])
            if done % 25 == 0 and abs(hits / done - power) > _CLEAR * (power * (1 - power) / done) ** 0.5:
                break
        return hits >= power * done

    low, high = 1, 8
    while not enough(high):
        low, high = high, high * 2
        if high > MOST_DOCUMENTS:
            return None
    while high - low > 1 and high > low * _FINE:
        middle = int(np.sqrt(low * high))
        middle = min(max(middle, low + 1), high - 1)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
