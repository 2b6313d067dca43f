"""The scale a mean is reported on: its own, through exp (perplexity), or through a square root (rms)."""

from __future__ import annotations

from dataclasses import replace
from math import exp, inf, isfinite, log, sqrt

from evalgate.core import Figure
from evalgate.errors import ScoreError


def scaled(figure: Figure, scale: str, *, support: tuple[float, float]) -> Figure:
    """A mean on its reporting scale: identity (interval cut to `support`), exp, or sqrt.

    The interval is carried through the monotone scale, the standard error by the delta method.

    Raises:
        ScoreError: the figure overflows. (An end that overflows is open.)
    """
    value, low, high, se = figure.known, figure.low, figure.high, figure.se
    if scale == "identity":
        # Rounding may leave the figure itself a hair outside the support; the interval still holds it.
        low = None if low is None else min(max(low, support[0]), value)
        high = None if high is None else max(min(high, support[1]), value)
    elif scale == "exp":
        value = _exp(value)
        se = None if se is None else se * value
        low = None if low is None else _exp(low)
        high = None if high is None else _exp(high)
        if not isfinite(value):
            raise ScoreError(
                f"exp({figure.known:.0f}) is too large to print: look at nll, and at the source that gave it"
            )
        if high is not None and not isfinite(high):
            high = se = None
    else:
        value = sqrt(value)
        se = None if se is None else (se / (2 * value) if value else 0.0)
        low = None if low is None else sqrt(max(low, 0.0))
        high = None if high is None else sqrt(high)
    return replace(figure.between(low, high), value=value, se=se)


def range_of_mean(support: tuple[float, float], scale: str) -> tuple[float, float]:
    """The range of a mean before scaling, from the metric's: squares of values in it for a root."""
    return (0.0, max(abs(support[0]), abs(support[1])) ** 2) if scale == "sqrt" else support


def linear(limit: float, scale: str) -> float:
    """A limit on the scale on which the mean is taken."""
    if scale == "identity":
        return limit
    if scale == "sqrt":
        return limit * limit
    return log(limit) if limit > 0 else -inf


def _exp(value: float) -> float:
    return exp(value) if value < 709 else inf
