"""How far a figure is worse than its noise floor."""

from __future__ import annotations

from typing import Literal, NamedTuple

Better = Literal["lower", "higher", "zero"]


class Ends(NamedTuple):
    """A figure with its interval; None = unknown, and for `low` or `high` also unbounded."""

    value: float | None
    low: float | None
    high: float | None


def excess(figure: Ends, floor: Ends, better: Better) -> Ends:
    """Positive = worse than the floor: figure - floor, floor - figure, or the difference of their sizes.

    The intervals are subtracted crosswise, so that the result covers whenever both do. A floor whose interval is
    unknown counts as known exactly.
    """
    at = floor.value if floor.value is not None else 0.0
    known = floor._replace(low=at if floor.low is None else floor.low, high=at if floor.high is None else floor.high)
    if better == "higher":
        return _minus(known, figure)
    if better == "zero":
        return _minus(size(figure), size(known))
    return _minus(figure, known)


def size(figure: Ends) -> Ends:
    """The figure without its sign."""
    value = None if figure.value is None else abs(figure.value)
    if figure.low is None or figure.high is None:
        return Ends(value, 0.0, None)
    low, high = sorted((abs(figure.low), abs(figure.high)))
    return Ends(value, 0.0 if figure.low <= 0 <= figure.high else low, high)


def _minus(a: Ends, b: Ends) -> Ends:
    def less(x: float | None, y: float | None) -> float | None:
        return None if x is None or y is None else x - y

    return Ends(less(a.value, b.value), less(a.low, b.high), less(a.high, b.low))
