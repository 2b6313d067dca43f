"""The plot of mean KL against size as SVG: every candidate with its interval, and the front of the best for their size.

KL is on a logarithmic axis. Colors are CSS variables: a page sets them, and a file of its own brings both themes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Literal, NamedTuple

from evalgate.printable import printable
from evalgate.reports._leaderboard import bits_text, bytes_text, data_text, named, quantity_text

if TYPE_CHECKING:
    from evalgate.leaderboard import Entry, Leaderboard

WIDTH, HEIGHT = 760, 430
LEFT, RIGHT, TOP, BOTTOM = 78, 24, 22, 58  # margins
_LETTER, _LINE = 6.6, 15  # width and height of a label's letters, about
RADIUS = 5
_LABEL = 24  # letters of a label at most
_FEW = 3.0  # a range narrower than this factor is shown around its middle
LIGHT = "--ink:#1a1c20;--soft:#595e67;--grid:#e4e1da;--paper:#ffffff;--front:#005a94;--point:#c24a08"
DARK = "--ink:#eceae5;--soft:#a3a8b1;--grid:#30353d;--paper:#131519;--front:#7cc0f5;--point:#ff9f66"
STYLE = """
.plot text { font: 12px system-ui, sans-serif; fill: var(--ink) }
.plot .soft { fill: var(--soft) }
.plot .grid { stroke: var(--grid) }
.plot .axis { stroke: var(--soft) }
.plot .front { stroke: var(--front); fill: none; stroke-width: 1.5; stroke-dasharray: 5 4 }
.plot .best { fill: var(--front); stroke: var(--front) }
.plot .other { fill: var(--paper); stroke: var(--point); stroke-width: 2 }
.plot .bar { stroke-width: 1.5; fill: none }
.plot .bar.best { stroke: var(--front) }
.plot .name { stroke: var(--paper); stroke-width: 3px; paint-order: stroke }
.plot .bar.other { stroke: var(--point) }
""".strip()


@dataclass(frozen=True)
class Point:
    """One candidate in the plot: bytes, KL in nats, and the ends of its interval; None = open."""

    entry: Entry
    size: int
    kl: float
    low: float | None
    high: float | None


def points(board: Leaderboard) -> list[Point]:
    """The candidates that can be drawn: those with a size and a KL."""
    found = []
    for entry in board.measured:
        least = entry.kl.least if entry.kl is not None else None
        if entry.size is None or least is None or entry.kl is None:
            continue
        high = least.high if entry.kl.value is not None else entry.kl.high.high if entry.kl.high is not None else None
        found.append(Point(entry, entry.size.bytes, least.value, least.low, high))
    return found


def description(board: Leaderboard) -> str:
    """The plot in words, for those who do not see it."""
    said = [
        f"{named(p.entry.name)}: {bytes_text(p.entry.size)}, mean KL {quantity_text(p.entry, 'kl', board).value}"
        + (", on the front" if p.entry.front else "")
        for p in sorted(points(board), key=lambda p: p.size)
    ]
    return f"Mean KL divergence from {named(board.reference.spec)} against bytes of the weights. {'; '.join(said)}."


class Line(NamedTuple):
    """A line through points, in pixels. kind: its CSS classes. closed: back to the first one."""

    kind: str
    points: tuple[tuple[float, float], ...]
    closed: bool = False


class Dot(NamedTuple):
    """A circle."""

    kind: str
    x: float
    y: float


class Label(NamedTuple):
    """A text. anchor: start, middle or end. upright: turned by 90 degrees to the left."""

    kind: str
    x: float
    y: float
    text: str
    anchor: Literal["start", "middle", "end"] = "start"
    upright: bool = False


class Named(NamedTuple):
    """Marks that belong to one candidate, and what is said of it where the pointer rests."""

    said: str
    marks: tuple[Line | Dot | Label, ...]


Mark = Line | Dot | Label | Named


def marks(board: Leaderboard) -> list[Mark]:
    """The whole plot, in pixels of WIDTH x HEIGHT; empty where no candidate can be drawn."""
    drawn = points(board)
    return [*_frame(board, drawn), *_front(drawn), *_points(board, drawn)] if drawn else []


def plot(board: Leaderboard, *, alone: bool = False) -> str:
    """The plot as an `svg` element; empty where no candidate can be drawn. alone: as a file of its own."""
    shapes = marks(board)
    if not shapes:
        return ""
    own = f'xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" ' if alone else ""
    style = (
        f"<style>.plot {{ {LIGHT} }} @media (prefers-color-scheme: dark) {{ .plot {{ {DARK} }} }} {STYLE}</style>"
        f'<rect width="{WIDTH}" height="{HEIGHT}" style="fill:var(--paper)"/>'
        if alone
        else ""
    )
    return (
        f'<svg {own}class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="plot-title plot-said">'
        f'<title id="plot-title">Mean KL against size</title><desc id="plot-said">{_safe(description(board))}</desc>'
        f"{style}{''.join(map(_svg, shapes))}</svg>"
    )


def _svg(mark: Mark) -> str:
    if isinstance(mark, Named):
        return f"<g><title>{_safe(mark.said)}</title>{''.join(map(_svg, mark.marks))}</g>"
    if isinstance(mark, Line):
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in mark.points)
        return f'<path class="{mark.kind}" d="M{path}{"Z" if mark.closed else ""}"/>'
    if isinstance(mark, Dot):
        return f'<circle class="{mark.kind}" cx="{mark.x:.1f}" cy="{mark.y:.1f}" r="{RADIUS}"/>'
    turned = f' transform="rotate(-90 {mark.x:.1f} {mark.y:.1f})"' if mark.upright else ""
    kind = f' class="{mark.kind}"' if mark.kind else ""
    place = f'x="{mark.x:.1f}" y="{mark.y:.1f}" text-anchor="{mark.anchor}"'
    return f"<text{kind} {place}{turned}>{_safe(mark.text)}</text>"


Scale = Callable[[float], float]


def _scales(drawn: Sequence[Point]) -> tuple[Scale, Scale, list[float], list[float]]:
    """Bytes to x, KL to y, and the ticks of both."""
    sizes = [point.size for point in drawn]
    wide = max(sizes) > 12 * min(sizes)
    low, high = (min(sizes) / 1.3, max(sizes) * 1.3) if wide else (0.0, max(sizes) * 1.12)
    least, most = limits(drawn)

    def x(value: float) -> float:
        share = math.log(value / low) / math.log(high / low) if wide else (value - low) / (high - low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        inside = min(max(value, least), most)
        return TOP + (1 - math.log(inside / least) / math.log(most / least)) * (HEIGHT - TOP - BOTTOM)

    return x, y, _decades(low, high) if wide else _steps(high), _decades(least, most)


def limits(drawn: Sequence[Point]) -> tuple[float, float]:
    """The ends of the KL axis: around all points and what is above zero of their intervals."""
    seen = [v for p in drawn for v in (p.kl, p.low, p.high) if v is not None and v > 0]
    if not seen:
        return 1e-9, 1e-6
    floor = min((p.kl for p in drawn if p.kl > 0), default=min(seen)) / 30  # an interval near zero may reach very low
    least, most = max(min(seen), floor), max(seen)
    while most / least < _FEW:
        least, most = least / 1.3, most * 1.3
    return least / 1.3, most * 1.3


def _decades(low: float, high: float) -> list[float]:
    """Round numbers between two ends of a logarithmic axis: 1, 2 and 5 of each decade, or powers of ten alone."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    within = (1, 2, 5) if last - first <= 3 else (1,)
    found = [m * 10.0**e for e in range(first, last + 1) for m in within]
    return [value for value in found if low <= value <= high]


def _steps(high: float) -> list[float]:
    """Five or so round numbers from 0 on."""
    rough = high / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough)
    return [step * n for n in range(int(high / step) + 1)]


def _frame(board: Leaderboard, drawn: Sequence[Point]) -> Iterator[Mark]:
    x, y, across, up = _scales(drawn)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for value in up:
        yield Line("grid", ((LEFT, y(value)), (right, y(value))))
        yield Label("soft", LEFT - 8, y(value) + 4, f"{value:g}", "end")
    for value in across:
        yield Line("axis", ((x(value), bottom), (x(value), bottom + 5)))
        yield Label("soft", x(value), bottom + 20, _tick(value), "middle")
    yield Line("axis", ((LEFT, bottom), (right, bottom)))
    yield Label("", (LEFT + right) / 2, HEIGHT - 14, "size of the weights", "middle")
    said = f"mean KL (nats), {board.confidence * 100:g} % interval"
    yield Label("", 16, (TOP + bottom) / 2, said, "middle", upright=True)


def _tick(value: float) -> str:
    return data_text(value).replace(".00 ", " ").replace(".0 ", " ") if value else "0"


def _front(drawn: Sequence[Point]) -> Iterator[Mark]:
    """The front as steps: at every size, how close the best candidate of at most that size is."""
    x, y, _, _ = _scales(drawn)
    best = sorted((p for p in drawn if p.entry.front), key=lambda p: p.size)
    if not best:
        return
    corners = [(x(best[0].size), float(TOP))]
    for point in best:
        corners += [(x(point.size), corners[-1][1]), (x(point.size), y(point.kl))]
    yield Line("front", (*corners, (WIDTH - RIGHT, corners[-1][1])))


def _points(board: Leaderboard, drawn: Sequence[Point]) -> Iterator[Mark]:
    x, y, _, _ = _scales(drawn)
    taken = [(x(p.size) - 7, y(p.kl) - 7, x(p.size) + 7, y(p.kl) + 7) for p in drawn]
    for point in sorted(drawn, key=lambda p: p.kl):
        kind = "best" if point.entry.front else "other"
        across, at = x(point.size), y(point.kl)
        found: list[Line | Dot | Label] = []
        positive = point.low is not None and point.low > 0
        if point.low is not None or point.high is not None:
            top = float(TOP) if point.high is None else y(point.high)
            bottom = y(point.low) if point.low is not None and positive else float(HEIGHT - BOTTOM)
            found.append(Line(f"bar {kind}", ((across, top), (across, bottom))))
            ends = [top] * (point.high is not None) + [bottom] * positive  # an open end has no cap
            found += [Line(f"bar {kind}", ((across - 4, end), (across + 4, end))) for end in ends]
        if point.entry.kl is not None and point.entry.kl.value is None:  # a bound: the value is above
            found.append(Line(kind, ((across - 6, at + 5), (across, at - 6), (across + 6, at + 5)), closed=True))
        else:
            found.append(Dot(kind, across, at))
        found.append(_label(point.entry.name, across, at, taken))
        yield Named(_said(board, point), tuple(found))


def _said(board: Leaderboard, point: Point) -> str:
    text = quantity_text(point.entry, "kl", board)
    bits = "" if point.entry.size is None or point.entry.size.bits is None else f", {bits_text(point.entry.size)} bits"
    return f"{named(point.entry.name)}: mean KL {text.value} {text.interval}, {bytes_text(point.entry.size)}{bits}"


def _label(name: str, across: float, at: float, taken: list[tuple[float, float, float, float]]) -> Label:
    """The name beside its point, where it covers no point and no other name."""
    shown = printable(name)
    shown = shown if len(shown) <= _LABEL else f"...{shown[3 - _LABEL :]}"
    wide = len(shown) * _LETTER
    places = [
        (across + dx if dx > 0 else across + dx - wide, at + dy) for dy in (-6, 16, -22, 32, 4) for dx in (10, -10)
    ]

    def boxed(place: tuple[float, float]) -> tuple[float, float, float, float]:
        return place[0], place[1] - 11, place[0] + wide, place[1] - 11 + _LINE

    inside = [p for p in places if p[0] >= LEFT and p[0] + wide <= WIDTH - 4 and TOP <= p[1] <= HEIGHT - BOTTOM]
    free = [p for p in inside if not any(_meet(boxed(p), box) for box in taken)]
    place = (free or inside or places)[0]
    taken.append(boxed(place))
    return Label("name", *place, shown)


def _meet(one: tuple[float, float, float, float], two: tuple[float, float, float, float]) -> bool:
    return one[0] < two[2] and two[0] < one[2] and one[1] < two[3] and two[1] < one[3]


def _safe(text: str) -> str:
    return escape(printable(text))
