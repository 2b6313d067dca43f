"""How far a figure is worse than its noise floor."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from evalgate.core import Figure

Better = Literal["lower", "higher", "zero"]


def excess(figure: Figure, floor: Figure, better: Better) -> Figure:
    """Positive = worse than the floor: figure - floor, floor - figure, or the difference of their sizes.

    The intervals are subtracted crosswise, so that the result covers whenever both do. A floor whose interval is
    unknown counts as known exactly. The result keeps the figure's confidence and method, and has no standard error.
    """
    at = floor.value if floor.value is not None else 0.0
    known = floor.between(at if floor.low is None else floor.low, at if floor.high is None else floor.high)
    if better == "higher":
        return _minus(figure, known, figure)
    if better == "zero":
        return _minus(figure, size(figure), size(known))
    return _minus(figure, figure, known)


def size(figure: Figure) -> Figure:
    """The figure without its sign."""
    value = None if figure.value is None else abs(figure.value)
    if figure.low is None or figure.high is None:
        return replace(figure.between(0.0, None), value=value, se=None)
    low, high = sorted((abs(figure.low), abs(figure.high)))
    return replace(figure.between(0.0 if figure.low <= 0 <= figure.high else low, high), value=value, se=None)


def difference(a: float | None, b: float | None) -> float | None:
    """a - b, None where one of them is not known."""
    return None if a is None or b is None else a - b


def _minus(figure: Figure, a: Figure, b: Figure) -> Figure:
    ends = figure.between(difference(a.low, b.high), difference(a.high, b.low))
    return replace(ends, value=difference(a.value, b.value), se=None)
