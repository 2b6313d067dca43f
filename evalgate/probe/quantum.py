"""The quantum of an endpoint's log-probabilities: how coarse the numbers are that it prints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

LEAST = 12  # distinct values: with fewer, chance could make all of them look rounded
MOST_DECIMALS = 6  # more than these say less than float32 itself, which has about 7 digits

Kind = Literal["decimal", "bfloat16", "float16", "float32"]
_STORED_BITS: dict[Kind, int] = {"bfloat16": 7, "float16": 10, "float32": 23}  # of the significand


@dataclass(frozen=True)
class Quantum:
    """The grid that printed log-probabilities lie on. decimals: digits behind the point, of kind "decimal" alone."""

    kind: Kind
    decimals: int = 0

    def half_step(self, logprob: float) -> float:
        """Most that rounding to the grid can have moved this log-probability, in nats.

        Half the distance to the next number of the grid away from 0, where it is the wider one. Twice that for float32:
        the fewest digits that tell a float32 from its neighbours may lie half a step off themselves.
        """
        if self.kind == "decimal":
            return 0.5 * 10.0**-self.decimals
        bits = _STORED_BITS[self.kind]
        if logprob == 0.0 or not math.isfinite(logprob):
            return 0.0
        _, exponent = math.frexp(logprob)  # |logprob| in [2**(exponent - 1), 2**exponent)
        half = 1.0 if self.kind == "float32" else 0.5
        return math.ldexp(half, max(exponent - 1, -14 if self.kind == "float16" else -126) - bits)

    def __str__(self) -> str:
        return f"{self.decimals} decimals" if self.kind == "decimal" else self.kind


def quantum_of(values: Iterable[float]) -> Quantum | None:
    """The coarsest grid that all values lie on; None where they are finer than float32, or too few to tell."""
    distinct = {v for v in values if v < 0 and math.isfinite(v)}
    if len(distinct) < LEAST:
        return None
    for decimals in range(1, MOST_DECIMALS + 1):
        if all(round(v, decimals) == v for v in distinct):
            return Quantum("decimal", decimals)
    kinds: tuple[tuple[Kind, Callable[[float], float]], ...] = (
        ("bfloat16", _bfloat16),
        ("float16", lambda v: float(np.float16(v))),
        ("float32", lambda v: float(np.float32(v))),
    )
    return next((Quantum(kind) for kind, cast in kinds if all(_same(cast(v), v) for v in distinct)), None)


def coarsest(found: Iterable[Quantum | None]) -> Quantum | None:
    """The one whose steps are widest at 1 nat; None where none is known."""
    return max((q for q in found if q is not None), key=lambda q: q.half_step(-1.0), default=None)


def _bfloat16(value: float) -> float:
    """The nearest number with a significand of 8 bits."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 256), exponent - 8)


def _same(cast: float, value: float) -> bool:
    """Whether `value` is `cast`, printed in full or with the fewest digits that tell it from other float32s."""
    return cast == value or (np.float32(cast) == np.float32(value) and float(str(np.float32(value))) == value)
