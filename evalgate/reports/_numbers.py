"""Figures as text: as many digits as the interval supports, and unknown intervals marked as unknown."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from evalgate.core import Interval

PERCENT_UNITS = frozenset({"fraction", "probability"})
MAX_DECIMALS = 9
SMALLEST_FIXED = 1e-5  # smaller sizes are written with an exponent


class FigureText(NamedTuple):
    """A figure's value and interval; the interval is empty where the statistic has none by nature."""

    value: str
    interval: str


def figure_text(value: float, interval: Interval, *, unit: str, documents: int) -> FigureText:
    """Value and interval with the same decimals: two significant digits of the half-width, three of the value.

    Fractions are written in percent. documents: how many the figure rests on.
    """
    scale, sign = (100.0, "%") if unit in PERCENT_UNITS else (1.0, "")
    value *= scale
    if interval.low is None or interval.high is None:
        return FigureText(plain(value) + sign, unknown(documents) if documents < 2 else "")
    low, high = interval.low * scale, interval.high * scale
    half = (high - low) / 2
    if half <= 0:
        return FigureText(plain(value) + sign, f"[{plain(low)}, {plain(high)}]{sign}")
    if 0 < max(abs(low), abs(high)) < SMALLEST_FIXED:
        return FigureText(f"{value:.2e}{sign}", f"[{low:.2e}, {high:.2e}]{sign}")
    decimals = max(_decimals(half, 2), _decimals(value, 3))
    texts = [_fixed(number, decimals) for number in (value, low, high)]
    return FigureText(texts[0] + sign, f"[{texts[1]}, {texts[2]}]{sign}")


def plain(value: float) -> str:
    """A number without an interval: five significant digits."""
    if value == 0:
        return "0"
    if abs(value) < SMALLEST_FIXED:
        return f"{value:.2e}"
    return _fixed(value, _decimals(value, 5))


def unknown(documents: int) -> str:
    """Why there is no interval."""
    return f"unknown ({count(documents, 'document')})"


def count(number: int, noun: str) -> str:
    """`1 document`, `1,234 documents`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _decimals(value: float, digits: int) -> int:
    """Decimals that show so many significant digits of the value; 0 for zero."""
    if value == 0:
        return 0
    return min(max(digits - 1 - math.floor(math.log10(abs(value))), 0), MAX_DECIMALS)


def _fixed(value: float, decimals: int) -> str:
    text = f"{value:,.{decimals}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text
