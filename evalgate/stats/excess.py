"""How far a figure is worse than its noise floor."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isfinite
from typing import Literal

from evalgate.core import Figure
from evalgate.stats.ratio import t_quantile

Better = Literal["lower", "higher", "zero"]


def excess(figure: Figure, floor: Figure, better: Better, *, support: tuple[float, float] = (-inf, inf)) -> Figure:
    """Positive = worse than the floor: figure - floor, floor - figure, or the difference of their sizes.

    The intervals are subtracted crosswise, so that the result covers whenever both do. support: the metric's range,
    beyond which a floor cannot be; an end of a floor that is unknown, as from one document, is the range's. Where that
    has none it is only sure that no floor is better than that of a model that repeats itself: 0, or 1 where higher is
    better. How large a floor may be stays open, and so does that end of the result. The result keeps the figure's
    confidence and method, and has no standard error.
    """
    low, high = _within(floor.low, support, at=0), _within(floor.high, support, at=1)
    if better == "higher":
        return _minus(figure, floor.between(low, 1.0 if high is None else high), figure)
    if better == "zero":
        return _minus(figure, size(figure), size(floor.between(low, high)))
    return _minus(figure, figure, floor.between(0.0 if low is None else low, high))


def at_confidence(figure: Figure, confidence: float) -> Figure:
    """The figure with its interval widened, or narrowed, to another confidence, by Student's quantiles.

    With one degree of freedom where the number of documents is not known: the cautious choice for a higher confidence.
    """
    df = max(figure.documents - 1.0, 1.0)
    times = t_quantile(confidence, df) / t_quantile(figure.interval.confidence, df)
    at = figure.value
    if at is None:
        return figure
    low, high = (None if end is None else at + times * (end - at) for end in (figure.low, figure.high))
    interval = replace(figure.interval.between(low, high), confidence=confidence)
    return replace(figure, interval=interval)


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


def _within(end: float | None, support: tuple[float, float], *, at: int) -> float | None:
    if end is None:
        return support[at] if isfinite(support[at]) else None
    return min(max(end, support[0]), support[1])


def _minus(figure: Figure, a: Figure, b: Figure) -> Figure:
    ends = figure.between(difference(a.low, b.high), difference(a.high, b.low))
    return replace(ends, value=difference(a.value, b.value), se=None)
