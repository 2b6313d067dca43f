"""How far an endpoint's printed log-probabilities may be off: the grid they are rounded to, and a sum above 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEAST = 12  # distinct values: with fewer, chance could make all of them look rounded
MOST_DECIMALS = 6  # more than these say less than float32 itself, which has about 7 digits

Kind = Literal["decimal", "bfloat16", "float16", "float32"]
_STORED_BITS: dict[Kind, int] = {"bfloat16": 7, "float16": 10, "float32": 23}  # of the significand


@dataclass(frozen=True)
class Quantum:
    """The grid that printed log-probabilities lie on, and by how much they may all be too high.

    decimals: digits behind the point, of kind "decimal" alone. excess: nats; where a server's probabilities add up to
    1 + x, each of its log-probabilities is ln(1 + x) above that of the distribution.
    """

    kind: Kind
    decimals: int = 0
    excess: float = 0.0

    def half_step(self, logprob: float) -> float:
        """Most that rounding to the grid can have moved this log-probability, in nats."""
        return float(self.half_steps(logprob))

    def half_steps(self, logprobs: ArrayLike) -> NDArray[np.float64]:
        """Most that rounding to the grid can have moved each log-probability, in nats; 0 where one is not finite.

        Half the distance to the next number of the grid away from 0, where it is the wider one. Twice that for float32:
        the fewest digits that tell a float32 from its neighbours may lie half a step off themselves.
        """
        values = np.asarray(logprobs, dtype=np.float64)
        finite = np.isfinite(values)
        if self.kind == "decimal":
            return np.where(finite, 0.5 * 10.0**-self.decimals, 0.0)
        least = -14 if self.kind == "float16" else -126
        _, exponent = np.frexp(np.where(finite & (values != 0.0), values, 2.0**least))  # |v| < 2**exponent <= 2 |v|
        half = 1.0 if self.kind == "float32" else 0.5
        return np.where(finite, np.ldexp(half, np.maximum(exponent - 1, least) - _STORED_BITS[self.kind]), 0.0)

    def rounding(self, logprobs: ArrayLike) -> NDArray[np.float64] | None:
        """`half_steps` as bounds must count them; None for float32, whose rounding their own slack covers."""
        return None if self.kind == "float32" else self.half_steps(logprobs)

    def doubts(self, logprobs: ArrayLike) -> NDArray[np.float64] | None:
        """Most that each log-probability may be off, rounding and excess together; None where that is nothing.

        The excess is the same for all of one position: differences between those have `rounding` alone.
        """
        off = self.rounding(logprobs)
        if not self.excess:
            return off
        return np.where(np.isfinite(logprobs), self.excess, 0.0) + (0.0 if off is None else off)

    def __str__(self) -> str:
        return f"{self.decimals} decimals" if self.kind == "decimal" else self.kind


@dataclass(frozen=True)
class RoundingCost:
    """What rounding takes from the bounds of one position, a mean over those that the probe saw.

    tv: how much wider the interval of TV becomes when the other side is exact. kl: the largest KL, nats, of which the
    listed alternatives show nothing, since it moves every log-probability by no more than the rounding does.
    """

    tv: float
    kl: float

    def __str__(self) -> str:
        return (
            f"TV is known {self.tv:.2g} less closely at each position, and a KL up to about {self.kl:.2g} nats "
            "cannot be told from 0"
        )


def rounding_cost(quantum: Quantum | None, positions: Iterable[Sequence[float]]) -> RoundingCost | None:
    """What the grid costs at positions whose listed log-probabilities these are; None where it costs nothing known."""
    found = []
    for logprobs in positions:
        values = np.asarray([v for v in logprobs if math.isfinite(v)], dtype=np.float64)
        off = None if quantum is None else quantum.rounding(values)
        if off is not None and len(values):
            p = np.exp(values)
            found.append(((p * 2 * np.sinh(off)).sum(), (p * (np.expm1(off) - off)).sum()))
    if not found:
        return None
    tv, kl = np.mean(found, axis=0)
    return RoundingCost(float(tv), float(kl))


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


def with_excess(quantum: Quantum | None, excess: float) -> Quantum | None:
    """The grid with an excess in nats."""
    return replace(quantum or Quantum("float32"), excess=excess) if excess else quantum


def _bfloat16(value: float) -> float:
    """The nearest number with a significand of 8 bits."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 256), exponent - 8)


def _same(cast: float, value: float) -> bool:
    """Whether `value` is `cast`, printed in full or with the fewest digits that tell it from other float32s."""
    return cast == value or (np.float32(cast) == np.float32(value) and float(str(np.float32(value))) == value)
