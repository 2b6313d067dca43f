"""The plot of mean KL against size as a PNG: the marks of the SVG, drawn by matplotlib where it is installed."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

from evalgate.printable import printable
from evalgate.reports._leaderboard import named
from evalgate.reports._pareto import HEIGHT, LIGHT, RADIUS, WIDTH, Dot, Line, Mark, Named, marks

if TYPE_CHECKING:
    from evalgate.leaderboard import Leaderboard

_DPI, _SCALE = 100, 2  # of a screen, and how many times as fine
_POINTS = 72 / _DPI  # of a pixel
_HEADING = 26  # pixels above the plot
_COLORS = dict(part.split(":") for part in LIGHT.replace("--", "").split(";"))


def png(board: Leaderboard) -> bytes | None:
    """The picture; None where there is nothing to draw. Raises ImportError where matplotlib is not installed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shapes = marks(board)
    if not shapes:
        return None
    size = (WIDTH / _DPI, (HEIGHT + _HEADING) / _DPI)
    figure = Figure(figsize=size, dpi=_DPI * _SCALE, facecolor=_COLORS["paper"])
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(HEIGHT, -_HEADING))
    axes.set_axis_off()
    heading = f"Mean KL from {named(board.reference.spec)} against size"
    axes.text(WIDTH / 2, -8, _plain(heading), ha="center", fontsize=13 * _POINTS, color=_COLORS["ink"])
    for mark in shapes:
        _draw(axes, mark)
    target = BytesIO()
    FigureCanvasAgg(figure).print_png(target, metadata={"Software": None})
    return target.getvalue()


def _draw(axes: Any, mark: Mark) -> None:
    if isinstance(mark, Named):
        for one in mark.marks:
            _draw(axes, one)
    elif isinstance(mark, Line):
        _draw_line(axes, mark)
    elif isinstance(mark, Dot):
        edge = _color(mark.kind)
        face = edge if mark.kind == "best" else _COLORS["paper"]
        style = {"ms": 2 * RADIUS * _POINTS, "mfc": face, "mec": edge, "mew": 2 * _POINTS}
        axes.plot([mark.x], [mark.y], "o", zorder=3, **style)
    else:
        align = {"start": "left", "middle": "center", "end": "right"}[mark.anchor]
        color, turned = _color(mark.kind), 90 if mark.upright else 0
        options: dict[str, Any] = {
            "ha": align,
            "va": "center" if turned else "baseline",
            "rotation": turned,
            "zorder": 4,
        }
        axes.text(mark.x, mark.y, _plain(mark.text), fontsize=12 * _POINTS, color=color, **options)


def _draw_line(axes: Any, mark: Line) -> None:
    corners = [*mark.points, *(mark.points[:1] if mark.closed else [])]
    across, up = zip(*corners, strict=True)
    width = (1.0 if mark.kind in ("grid", "axis") else 1.5) * _POINTS
    dashes = {"dashes": (4, 3)} if mark.kind == "front" else {}
    axes.plot(across, up, color=_color(mark.kind), linewidth=width, zorder=1 if mark.kind == "front" else 2, **dashes)


def _color(kind: str) -> str:
    names = {"grid": "grid", "axis": "soft", "soft": "soft", "front": "front", "best": "front", "other": "point"}
    return str(_COLORS[names.get(kind.removeprefix("bar "), "ink")])


def _plain(text: str) -> str:
    """Text that matplotlib does not read as mathematics."""
    return printable(text).replace("$", r"\$")
