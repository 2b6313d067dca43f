"""The scale a mean is reported on: its own, through exp (perplexity), or through a square root (rms)."""

from __future__ import annotations

from dataclasses import replace
from math import exp, inf, isfinite, sqrt

from evalgate.core import Estimate
from evalgate.errors import ScoreError


def scaled(estimate: Estimate, scale: str, *, support: tuple[float, float]) -> Estimate:
    """A mean on its reporting scale: identity (interval cut to `support`), exp, or sqrt.

    The interval is carried through the monotone scale, the standard error by the delta method.

    Raises:
        ScoreError: the figure overflows. (An interval that overflows is unknown.)
    """
    value, low, high, se = estimate.value, estimate.low, estimate.high, estimate.se
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
                f"exp({estimate.value:.0f}) is too large to print: look at nll, and at the source that gave it"
            )
        if high is not None and not isfinite(high):
            low = high = se = None
    else:
        value = sqrt(value)
        se = None if se is None else (se / (2 * value) if value else 0.0)
        low = None if low is None else sqrt(max(low, 0.0))
        high = None if high is None else sqrt(high)
    return replace(estimate, value=value, low=low, high=high, se=se)


def _exp(value: float) -> float:
    return exp(value) if value < 709 else inf
