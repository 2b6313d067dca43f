"""Scales: where a value lies between the two ends of an axis, and which ticks the axis has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10
from typing import NamedTuple, Protocol

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_FEWEST, _MOST = 1e-3, 1e5  # sizes that are written without a power of ten


class Tick(NamedTuple):
    """A mark on an axis; no label = a minor one."""

    value: float
    label: str


class Scale(Protocol):
    """An axis."""

    def at(self, value: float) -> float:
        """Where the value lies, 0 to 1; a value beyond an end lies on that end."""

    def ticks(self) -> Sequence[Tick]:
        """The marks of the axis, in order."""

    def holds(self, value: float) -> bool:
        """Whether the value lies between the ends."""


@dataclass(frozen=True)
class Linear:
    """Equal steps from low to high. percent: values are fractions and labels percent. most: ticks at most."""

    low: float
    high: float
    percent: bool = False
    most: int = 6

    @classmethod
    def over(cls, values: Iterable[float], *, zero: bool = True, percent: bool = False, most: int = 6) -> Linear:
        """From 0 (or the least value) to a round number above the largest."""
        found = [v for v in values if isfinite(v)] or [0.0, 1.0]
        low, high = min(found), max(found)
        if zero:
            low, high = min(low, 0.0), max(high, 0.0)
        if low == high:
            low, high = (low - abs(low) * 0.1, high + abs(high) * 0.1) if low else (0.0, 1.0)
        step = _step((high - low) * 1.02, most)
        return cls(floor(low / step + 1e-9) * step, ceil(high / step - 1e-9) * step, percent, most)

    def at(self, value: float) -> float:
        """See `Scale`."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def holds(self, value: float) -> bool:
        """See `Scale`."""
        return self.low <= value <= self.high

    def ticks(self) -> list[Tick]:
        """See `Scale`."""
        step = _step(self.high - self.low, self.most)
        count = floor((self.high - self.low) / step + 1e-6)
        values = [self.low + k * step for k in range(count + 1)]
        scale, sign = (100.0, " %") if self.percent else (1.0, "")
        decimals = max(0, -floor(log10(step * scale) + 1e-9))
        small = not self.percent and max(abs(self.low), abs(self.high)) < _FEWEST
        return [Tick(v, number(v) if small else f"{v * scale:,.{decimals}f}{sign}".replace("-", "−")) for v in values]


@dataclass(frozen=True)
class Log:
    """Equal factors from low to high, both above 0."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Iterable[float], *, least: float = 0.0) -> Log:
        """Whole decades around the values above 0; nothing below `least`."""
        found = [v for v in values if isfinite(v) and v > 0] or [0.1, 1.0]
        low, high = floor(log10(max(min(found), least or 0.0)) + 1e-9), ceil(log10(max(found)) - 1e-9)
        return cls(10.0**low, 10.0 ** max(high, low + 1))

    def at(self, value: float) -> float:
        """See `Scale`."""
        if value <= self.low:
            return 0.0
        return min(log10(value / self.low) / log10(self.high / self.low), 1.0)

    def holds(self, value: float) -> bool:
        """See `Scale`."""
        return self.low <= value <= self.high

    def ticks(self) -> list[Tick]:
        """See `Scale`."""
        first, last = ceil(log10(self.low) - 1e-9), floor(log10(self.high) + 1e-9)
        every = max(1, ceil((last - first) / 6))
        found = []
        for decade in range(first, last + 1):
            found.append(Tick(10.0**decade, power(decade) if (decade - first) % every == 0 else ""))
            if last - first <= 3 and decade < last:
                labelled = last - first <= 1
                found += [Tick(k * 10.0**decade, number(k * 10.0**decade) if labelled else "") for k in (2, 5)]
        return found


@dataclass(frozen=True)
class SignedLog:
    """Both signs on a logarithmic axis: from -most over a middle stretch [-least, least] to most."""

    least: float
    most: float
    middle: float = 0.06  # share of the axis

    def at(self, value: float) -> float:
        """See `Scale`."""
        half = (1 - self.middle) / 2
        size = min(abs(value), self.most)
        if size <= self.least:
            return 0.5 + value / self.least * self.middle / 2
        out = self.middle / 2 + half * log10(size / self.least) / log10(self.most / self.least)
        return 0.5 + (out if value > 0 else -out)

    def holds(self, value: float) -> bool:
        """See `Scale`."""
        return abs(value) <= self.most

    def ticks(self) -> list[Tick]:
        """See `Scale`."""
        decades = range(round(log10(self.least)) + 1, round(log10(self.most)) + 1)
        right = [Tick(10.0**d, f"+{_plain(10.0**d)}") for d in decades]
        return [*(Tick(-t.value, f"−{t.label[1:]}") for t in reversed(right)), Tick(0.0, "0"), *right]


@dataclass(frozen=True)
class Band:
    """One stretch for each name, in order; a value is the index of a name."""

    names: tuple[str, ...]

    def at(self, value: float) -> float:
        """See `Scale`. The middle of the stretch."""
        return (value + 0.5) / max(len(self.names), 1)

    def holds(self, value: float) -> bool:
        """See `Scale`."""
        return 0 <= value < len(self.names)

    def ticks(self) -> list[Tick]:
        """See `Scale`."""
        return [Tick(float(i), name) for i, name in enumerate(self.names)]


def number(value: float, digits: int = 3) -> str:
    """A number in a few digits: `0.0035`, `1.2 × 10⁻⁷`, `1,234`."""
    if value == 0 or not isfinite(value):
        return "0" if value == 0 else "∞"
    size = abs(value)
    sign = "−" if value < 0 else ""
    if _FEWEST <= size < _MOST:
        decimals = max(0, digits - 1 - floor(log10(size)))
        text = f"{size:,.{decimals}f}"
        return sign + (text.rstrip("0").rstrip(".") if "." in text else text)
    mantissa, _, exponent = f"{size:.{digits - 1}e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    lead = "" if mantissa == "1" else f"{mantissa} × "
    return f"{sign}{lead}{power(int(exponent))}"


def power(exponent: int) -> str:
    """`10⁻³`; powers that are easily read are written out: `0.01`, `1`, `100`."""
    return _plain(10.0**exponent) if -2 <= exponent <= 3 else f"10{str(exponent).translate(_SUPERSCRIPT)}"


def _plain(value: float) -> str:
    return f"{value:,.6f}".rstrip("0").rstrip(".")


def _step(span: float, most: int) -> float:
    """The least of 1, 2 and 5 times a power of ten that divides the span into at most `most` steps."""
    rough = span / max(most, 1)
    decade = 10.0 ** floor(log10(rough))
    return next(k * decade for k in (1.0, 2.0, 5.0, 10.0) if k * decade >= rough * (1 - 1e-9))
