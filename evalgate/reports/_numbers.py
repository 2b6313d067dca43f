"""Figures as text: as many digits as the interval supports; open ends and unknown intervals are called that."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from evalgate.core import counted

if TYPE_CHECKING:
    from evalgate.core import Interval

PERCENT_UNITS = frozenset({"fraction", "probability"})
MAX_DECIMALS = 9
SMALLEST_FIXED = 1e-5  # smaller sizes are written with an exponent
OPEN = "open"


class Digits(NamedTuple):
    """Significant digits that decide how many decimals are written: of the interval's half-width, and of the value.

    alone: of a value without an interval.
    """

    width: int
    value: int
    alone: int


FULL, BRIEF = Digits(2, 3, 5), Digits(1, 2, 3)


class FigureText(NamedTuple):
    """A figure's value and interval; the interval is empty where the statistic has none by nature."""

    value: str
    interval: str


def figure_text(value: float, interval: Interval, *, unit: str, documents: int, digits: Digits = FULL) -> FigureText:
    """Value and interval with the same decimals, as many as the interval supports.

    Fractions are written in percent. documents: how many the figure rests on. digits: FULL where figures are looked up,
    BRIEF in a sentence.
    """
    scale, sign = (100.0, "%") if unit in PERCENT_UNITS else (1.0, "")
    value *= scale
    if not interval.known:
        return FigureText(plain(value, digits.alone) + sign, unknown(documents) if documents < 2 else "")
    ends = [None if end is None else end * scale for end in (interval.low, interval.high)]
    write = _writer(value, [end for end in ends if end is not None], digits)
    return FigureText(
        write(value) + sign, _bracketed(ends, write, sign) + (f" {interval.label}" if interval.label else "")
    )


def interval_text(interval: Interval, *, unit: str, digits: Digits = FULL) -> str:
    """The interval of a figure that has no value, as `figure_text` writes it; `unknown` where there is none."""
    if not interval.known:
        return "unknown"
    scale, sign = (100.0, "%") if unit in PERCENT_UNITS else (1.0, "")
    ends = [None if end is None else end * scale for end in (interval.low, interval.high)]
    write = partial(plain, digits=digits.alone)
    return _bracketed(ends, write, sign) + (f" {interval.label}" if interval.label else "")


def _writer(value: float, ends: list[float], digits: Digits) -> Callable[[float], str]:
    """How the figure and its known ends are written."""
    width = (max(ends) - min(ends)) / 2 if len(ends) == 2 else max((abs(value - end) for end in ends), default=0.0)
    if width <= 0:
        return partial(plain, digits=digits.alone)
    if 0 < max(map(abs, ends)) < SMALLEST_FIXED and abs(value) < SMALLEST_FIXED:
        return lambda number: f"{number:.{digits.value - 1}e}"
    decimals = max(_decimals(width, digits.width), _decimals(value, digits.value))
    return lambda number: _fixed(number, decimals)


def _bracketed(ends: list[float | None], write: Callable[[float], str], sign: str) -> str:
    """`[0.1, 0.2]`, `[0.1, open)`, `(open, 0.2]`."""
    low, high = ends
    left = f"({OPEN}" if low is None else f"[{write(low)}"
    right = f"{OPEN})" if high is None else f"{write(high)}]"
    return f"{left}, {right}{sign}"


def plain(value: float, digits: int = FULL.alone) -> str:
    """A number without an interval: five significant digits; three with an exponent."""
    if value == 0:
        return "0"
    if abs(value) < SMALLEST_FIXED:
        return f"{value:.{max(digits - 3, 0)}e}"
    return _fixed(value, _decimals(value, digits))


def unknown(documents: int) -> str:
    """Why there is no interval."""
    return f"unknown ({counted(documents, 'document')})"


def _decimals(value: float, digits: int) -> int:
    """Decimals that show so many significant digits of the value; 0 for zero."""
    if value == 0:
        return 0
    return min(max(digits - 1 - math.floor(math.log10(abs(value))), 0), MAX_DECIMALS)


def _fixed(value: float, decimals: int) -> str:
    text = f"{value:,.{decimals}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text
