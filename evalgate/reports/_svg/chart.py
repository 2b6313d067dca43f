"""A chart: two scales, their axes, and marks, written as one SVG element."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING
from unicodedata import east_asian_width

from evalgate.printable import printable
from evalgate.reports._svg.scales import Band, Scale

if TYPE_CHECKING:
    from markupsafe import Markup

PALETTE = 6  # colours, and shapes of marks, before they repeat
_CHARACTER = 7.0  # CSS pixels that a character of a label takes, at most on average
_LONGEST_LABEL = 20  # characters
_RADIUS = 3.6
_SHAPES = (
    "M{l},{y}a{r},{r} 0 1,0 {d},0a{r},{r} 0 1,0 -{d},0Z",
    "M{l},{t}h{d}v{d}h-{d}Z",
    "M{x},{t}L{R},{b}L{l},{b}Z",
    "M{x},{t}L{R},{y}L{x},{b}L{l},{y}Z",
    "M{l},{t}L{R},{t}L{x},{b}Z",
    "M{l},{p}h{q}v-{q}h{e}v{q}h{q}v{e}h-{q}v{q}h-{e}v-{q}h-{q}Z",
)


@dataclass(frozen=True)
class Span:
    """An interval along an axis; None = that end is open, and drawn to the end of the axis."""

    low: float | None
    high: float | None


@dataclass(frozen=True)
class Mark:
    """A point. across: its interval along x. along: its interval along y. said: what is read of it on hover. hollow: it
    has no interval. pointing: "up" or "right" for a lower bound, which says only that the value is no smaller."""

    x: float
    y: float
    across: Span | None = None
    along: Span | None = None
    said: str = ""
    hollow: bool = False
    pointing: str = ""
    shift: float = 0.0  # CSS pixels off its place, across the axis of names


class Chart:
    """Marks are drawn in the order in which they are added, over the grid and below the axes' labels."""

    def __init__(
        self,
        x: Scale,
        y: Scale,
        *,
        x_label: str = "",
        y_label: str = "",
        width: int = 460,
        height: int = 290,
    ) -> None:
        self.x, self.y, self.width, self.height = x, y, width, height
        self.x_label, self.y_label = x_label, y_label
        labels = [_cut(tick.label) for tick in y.ticks()]
        self.left = 12 + max((_width(label) for label in labels), default=0) + (18 if y_label else 0)
        self.right, self.top = 14.0, 20.0
        self.bottom = 46.0 if x_label else 28.0
        self._parts: list[str] = []
        self._over: list[str] = []

    # Marks

    def bars(self, bins: Iterable[tuple[float, float, float, str]], *, series: int = 0) -> None:
        """Bars on y = 0 (or the axis' low end): (from, to, height, said) along x."""
        for low, high, size, said in bins:
            left, right, top, base = self._x(low), self._x(high), self._y(size), self._base()
            if base - top < 0.05:
                continue
            gap = min(0.5, (right - left) / 6)
            self._parts.append(
                f'<rect class="bar s{series % PALETTE}" x="{left + gap:.1f}" y="{top:.1f}" '
                f'width="{max(right - left - 2 * gap, 0.5):.1f}" height="{base - top:.1f}">{_title(said)}</rect>'
            )

    def steps(self, bins: Sequence[tuple[float, float, float]], *, series: int = 0, kind: str = "") -> None:
        """An outline of bars: (from, to, height) of adjacent bins along x."""
        if not bins:
            return
        path = f"M{self._x(bins[0][0]):.1f},{self._base():.1f}"
        for low, high, size in bins:
            path += f"L{self._x(low):.1f},{self._y(size):.1f}L{self._x(high):.1f},{self._y(size):.1f}"
        path += f"L{self._x(bins[-1][1]):.1f},{self._base():.1f}"
        self._parts.append(f'<path class="line s{series % PALETTE} {kind}" d="{path}"/>')

    def line(self, points: Sequence[tuple[float, float]], *, series: int = 0, kind: str = "") -> None:
        """A line through points."""
        if len(points) > 1:
            path = "L".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in points)
            self._parts.append(f'<path class="line s{series % PALETTE} {kind}" d="M{path}"/>')

    def area(self, points: Sequence[tuple[float, Span]], *, series: int = 0) -> None:
        """What lies between the ends of intervals along y; an open end is drawn to the end of the axis."""
        if len(points) > 1:
            ends = [(self._x(x), self._end(self.y, s.low, low=True), self._end(self.y, s.high)) for x, s in points]
            path = "L".join(f"{x:.1f},{self._over_y(high):.1f}" for x, _, high in ends)
            back = "L".join(f"{x:.1f},{self._over_y(low):.1f}" for x, low, _ in reversed(ends))
            self._parts.append(f'<path class="area s{series % PALETTE}" d="M{path}L{back}Z"/>')

    def marks(self, marks: Iterable[Mark], *, series: int = 0) -> None:
        """Points with their intervals."""
        color = f"s{series % PALETTE}"
        for one in marks:
            flat = isinstance(self.x, Band)
            x = self._x(one.x) + (one.shift if flat else 0)
            y = self._y(one.y) + (0 if flat else one.shift)
            parts = [*self._whisker_x(one.across, y), *self._whisker_y(one.along, x)]
            hollow = " hollow" if one.hollow else ""
            parts.append(f'<path class="mark {color}{hollow}" d="{shape(x, y, series)}"/>')
            if one.pointing:
                arrow = f"M{x + 6:.1f},{y:.1f}h9m-3,-3l3,3l-3,3"
                if one.pointing == "up":
                    arrow = f"M{x:.1f},{y - 6:.1f}v-9m-3,3l3,-3l3,3"
                parts.append(f'<path class="whisker {color}" d="{arrow}"/>')
            said = _title(one.said)
            self._parts.append(f'<g class="{color}">{said}{"".join(parts)}</g>')

    def floor_x(self, value: float, label: str) -> None:
        """A line across at an x, as the noise floor is drawn; its label says where it lies beyond the axis."""
        left, right = self.left, self.width - self.right
        x = self._x(value)
        if self.x.holds(value):
            self._over.append(f'<path class="floor" d="M{x:.1f},{self.top:.1f}V{self._bottom():.1f}"/>')
        else:
            label = f"← {label}" if x < (left + right) / 2 else f"{label} →"
        at = min(max(x - 2, left), right - _width(label) * 0.9)
        self._over.append(f'<text class="note" x="{at:.1f}" y="{self.top - 6:.1f}">{_text(label)}</text>')

    def floor_y(self, value: float, label: str) -> None:
        """A line along at a y, as the noise floor is drawn."""
        if not self.y.holds(value):
            self._over.append(
                f'<text class="note" x="{self.left + 5:.1f}" y="{self._bottom() - 5:.1f}">{_text(label)} (below)</text>'
            )
            return
        y = self._y(value)
        self._over.append(f'<path class="floor" d="M{self.left:.1f},{y:.1f}H{self.width - self.right:.1f}"/>')
        above = y - 5 if y - 16 > self.top else y + 13
        right = self.width - self.right - 2
        self._over.append(f'<text class="note" x="{right:.1f}" y="{above:.1f}" text-anchor="end">{_text(label)}</text>')

    def diagonal(self, label: str) -> None:
        """Where x and y are the same; both scales must have the same ends."""
        ends = f"M{self.left:.1f},{self._bottom():.1f}L{self.width - self.right:.1f},{self.top:.1f}"
        self._parts.append(f'<path class="floor" d="{ends}"/>')
        self._over.append(f'<text class="note" x="{self.left + 8:.1f}" y="{self.top + 9:.1f}">{_text(label)}</text>')

    def tag_x(self, value: float, label: str, *, row: int = 0) -> None:
        """A short word over a value of x, with a tick from the top."""
        if self.x.holds(value):
            x, y = self._x(value), self.top + 9 + 13 * row
            self._over.append(f'<path class="tag" d="M{x:.1f},{y + 3:.1f}V{self._bottom():.1f}"/>')
            end = x > self.width * 0.7
            self._over.append(
                f'<text class="note strong" x="{x + (-4 if end else 4):.1f}" y="{y:.1f}" '
                f'text-anchor="{"end" if end else "start"}">{_text(label)}</text>'
            )

    # The whole

    def svg(self, name: str, title: str, description: str) -> Markup:
        """The chart, titled and described for who cannot see it. name: an id that no other element of the page has."""
        from markupsafe import Markup

        body = "".join([*self._grid(), *self._parts, *self._axes(), *self._over])
        return Markup(
            f'<svg class="chart" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-labelledby="{name}t {name}d"><title id="{name}t">{_text(title)}</title>'
            f'<desc id="{name}d">{_text(description)}</desc>{body}</svg>'
        )

    # Places

    def _x(self, value: float) -> float:
        return self.left + self.x.at(value) * (self.width - self.left - self.right)

    def _y(self, value: float) -> float:
        along = self.y.at(value)
        return self._over_y(along if not isinstance(self.y, Band) else 1 - along)

    def _over_y(self, along: float) -> float:
        return self.top + (1 - along) * (self.height - self.top - self.bottom)

    def _bottom(self) -> float:
        return self.height - self.bottom

    def _base(self) -> float:
        return self._y(0.0)

    @staticmethod
    def _end(scale: Scale, value: float | None, *, low: bool = False) -> float:
        if value is None or not isfinite(value):
            return 0.0 if low else 1.0
        return scale.at(value)

    def _whisker_x(self, span: Span | None, y: float) -> list[str]:
        if span is None:
            return []
        inner = self.width - self.left - self.right
        left = self.left + inner * self._end(self.x, span.low, low=True)
        right = self.left + inner * self._end(self.x, span.high)
        caps = "".join(f"M{x:.1f},{y - 3:.1f}v6" for x, e in ((left, span.low), (right, span.high)) if _held(self.x, e))
        return [f'<path class="whisker{_open(span)}" d="M{left:.1f},{y:.1f}H{right:.1f}{caps}"/>']

    def _whisker_y(self, span: Span | None, x: float) -> list[str]:
        if span is None:
            return []
        low, high = self._over_y(self._end(self.y, span.low, low=True)), self._over_y(self._end(self.y, span.high))
        caps = "".join(f"M{x - 3:.1f},{y:.1f}h6" for y, e in ((low, span.low), (high, span.high)) if _held(self.y, e))
        return [f'<path class="whisker{_open(span)}" d="M{x:.1f},{low:.1f}V{high:.1f}{caps}"/>']

    # Axes

    def _grid(self) -> Iterable[str]:
        right, bottom = self.width - self.right, self._bottom()
        if not isinstance(self.x, Band):
            d = "".join(f"M{self._x(t.value):.1f},{self.top:.1f}V{bottom:.1f}" for t in self.x.ticks() if t.label)
            yield f'<path class="grid" d="{d}"/>'
        d = "".join(f"M{self.left:.1f},{self._y(t.value):.1f}H{right:.1f}" for t in self.y.ticks() if t.label)
        yield f'<path class="grid" d="{d}"/>'

    def _axes(self) -> Iterable[str]:
        right, bottom = self.width - self.right, self._bottom()
        base = self._base() if not isinstance(self.y, Band) and self.y.holds(0.0) else bottom
        yield f'<path class="axis" d="M{self.left:.1f},{base:.1f}H{right:.1f}"/>'
        d = "".join(f"M{self._x(t.value):.1f},{bottom:.1f}v{4 if t.label else 2.5}" for t in self.x.ticks())
        yield f'<path class="axis" d="{d}"/>'
        taken = -1e9
        for tick in self.x.ticks():
            label = _cut(tick.label)
            wide = _width(label)
            x = min(max(self._x(tick.value), wide / 2), self.width - wide / 2)
            if not label or x - wide / 2 < taken:
                continue
            taken = x + wide / 2 + 3
            yield f'<text class="tick" x="{x:.1f}" y="{bottom + 17:.1f}" text-anchor="middle">{_text(label)}</text>'
        for tick in self.y.ticks():
            if tick.label:
                yield (
                    f'<text class="tick" x="{self.left - 7:.1f}" y="{self._y(tick.value) + 4:.1f}" text-anchor="end">'
                    f"{_text(_cut(tick.label))}</text>"
                )
        if self.x_label:
            yield (
                f'<text class="label" x="{(self.left + right) / 2:.1f}" y="{self.height - 8}" text-anchor="middle">'
                f"{_text(self.x_label)}</text>"
            )
        if self.y_label:
            middle = (self.top + bottom) / 2
            yield (
                f'<text class="label" x="12" y="{middle:.1f}" text-anchor="middle" '
                f'transform="rotate(-90 12 {middle:.1f})">{_text(self.y_label)}</text>'
            )


def standalone(svg: str, style: str) -> str:
    """A chart as a file of its own, with the rules that color it."""
    opened = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    head, _, rest = opened.partition("<title")
    return f"{head}<style>{style}</style><title{rest}"


def shape(x: float, y: float, series: int) -> str:
    """Path data of a series' mark around a place; shapes differ, for who cannot tell the colours apart."""
    r = _RADIUS
    arm = 3 * r / 4  # of the plus, from its middle stretch outward
    places = {"x": x, "y": y, "l": x - r, "R": x + r, "t": y - r, "b": y + r, "r": r, "d": 2 * r}
    places |= {"p": y - r / 4, "q": arm, "e": r / 2}
    return _SHAPES[series % PALETTE].format(**{name: f"{value:.1f}" for name, value in places.items()})


def _held(scale: Scale, end: float | None) -> bool:
    """Whether an interval ends within the axis, and is drawn with a cap there."""
    return end is not None and scale.holds(end)


def _open(span: Span) -> str:
    return " open" if span.low is None or span.high is None else ""


def _title(said: str) -> str:
    return f"<title>{_text(said)}</title>" if said else ""


def _text(text: str) -> str:
    from markupsafe import escape

    return str(escape(printable(text)))


def _width(label: str) -> float:
    """CSS pixels, roughly: wide scripts take two places."""
    return _CHARACTER * sum(2 if east_asian_width(c) in "WF" else 1 for c in label)


def _cut(label: str) -> str:
    return label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 1]}…"
