"""Data of plots (`evalgate.stats.series`) as plotly figures. Nothing is computed here but where ink goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from evalgate.core import counted
from evalgate.errors import UsageError
from evalgate.printable import printable
from evalgate.reports._numbers import figure_text, interval_text
from evalgate.stats.series.distribution import LEAST_DELTA

if TYPE_CHECKING:
    from evalgate.core import Figure
    from evalgate.stats import series

# Okabe and Ito's colours, which people who do not see all colours can tell apart, less the yellow one on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("solid", "dot", "dashdot", "longdash")
_WIDE, _HIGH = 760, 380  # pixels
_ENDS = {"low": "lower bound", "high": "upper bound"}
_LONGEST = 60  # characters of a name in a legend


def plotly() -> Any:
    """`plotly.graph_objects`. Raises UsageError saying how to install it."""
    try:
        import plotly.graph_objects as found
    except ImportError:
        raise UsageError("plots need plotly: run pip install 'evalgate-lm[notebook]'") from None
    return found


def distributions(
    shown: Sequence[series.Distribution], means: dict[str, float], floors: Sequence[series.NoiseFloor]
) -> Any:
    """Shares of positions over a logarithmic axis, one outline a candidate, with its mean as a line."""
    go = plotly()
    figure = go.Figure()
    for place, one in enumerate(shown):
        edges = [edge for b in one.bins for edge in (b.low, b.high)]
        shares = [share for b in one.bins for share in (b.share, b.share)]
        below = f", {counted(one.below, 'position')} below the axis" if one.below else ""
        figure.add_scatter(
            x=edges,
            y=shares,
            mode="lines",
            fill="tozeroy",
            fillcolor=_faint(place),
            line=_line(place),
            name=f"{_name(one)}{below}",
            hovertemplate="%{x:.3g}: %{y:.2%}",
        )
        if means.get(one.candidate, 0.0) > 0:
            figure.add_vline(x=means[one.candidate], line={**_line(place), "width": 1})
    metric, unit = (shown[0].metric, shown[0].unit) if shown else ("", "")
    _floor(figure, "x", floors)
    figure.update_xaxes(type="log", title=f"{metric} of a position, {unit}", exponentformat="power")
    figure.update_yaxes(title="share of positions", tickformat=".0%", rangemode="tozero")
    return _finished(figure, f"Distribution of {metric}", "vertical lines are means")


def signed(shown: Sequence[series.Distribution]) -> Any:
    """Shares of positions over an axis that is logarithmic to either side of zero."""
    go = plotly()
    figure = go.Figure()
    for place, one in enumerate(shown):
        edges = [_signed_log(edge) for b in one.bins for edge in (b.low, b.high)]
        shares = [share for b in one.bins for share in (b.share, b.share)]
        text = [f"{100 * b.low:.3g} to {100 * b.high:.3g}%" for b in one.bins for _ in range(2)]
        figure.add_scatter(
            x=edges,
            y=shares,
            text=text,
            mode="lines",
            fill="tozeroy",
            fillcolor=_faint(place),
            line=_line(place),
            name=_name(one),
            hovertemplate="%{text}: %{y:.2%}",
        )
    decades = [-1.0, -0.1, -0.01, -0.001, -1e-4, 1e-4, 0.001, 0.01, 0.1, 1.0]
    figure.update_xaxes(
        title="change of the actual token's probability",
        tickvals=[_signed_log(value) for value in decades],
        ticktext=[f"{100 * value:+g}%" for value in decades],
    )
    figure.update_yaxes(title="share of positions", tickformat=".0%", rangemode="tozero")
    return _finished(figure, "Change of the actual token's probability (delta-p)", "candidate minus reference")


def profiles(shown: Sequence[series.Profile], floors: Sequence[series.NoiseFloor]) -> Any:
    """A metric's mean in every part of a cut, with intervals that hold together."""
    go = plotly()
    figure = go.Figure()
    for place, one in enumerate(shown):
        figures = [part.figure for part in one.parts]
        figure.add_scatter(
            x=[_escaped(part.name) for part in one.parts],
            y=[f.value for f in figures],
            error_y=_bars(figures),
            text=[f"{_text(p.figure, one.unit, p.documents)}, {counted(p.documents, 'document')}" for p in one.parts],
            mode="lines+markers" if one.by in ("position", "entropy") else "markers",
            line=_line(place),
            marker={"size": 9},
            name=_name(one),
            hovertemplate="%{x}: %{text}",
        )
    first = shown[0]
    _floor(figure, "y", floors)
    figure.update_xaxes(type="category", title=_AXES[first.by])
    figure.update_yaxes(title=f"mean {first.metric}, {first.unit}", rangemode="tozero")
    figure.update_layout(scattermode="group", scattergap=0.8)  # candidates stand side by side, not on one another
    said = f"{100 * first.confidence:g} % intervals; those of one candidate hold together"
    return _finished(figure, f"Mean {first.metric} by {_AXES[first.by]}", said)


_AXES = {
    "position": "position in the window",
    "entropy": "entropy of the reference",
    "domain": "domain",
    "token": "class of the token",
    "document": "document",
}


def calibrations(shown: Sequence[series.Calibration]) -> Any:
    """What is stated against what it is held against, with the diagonal."""
    go = plotly()
    figure = go.Figure()
    ends = [value for one in shown for b in one.bins for value in (b.stated, b.actual.value) if value is not None]
    span = [0.0, max(ends, default=1.0)]
    figure.add_scatter(x=span, y=span, mode="lines", line={"color": "#888888", "dash": "dash"}, name="as sure as right")
    for place, one in enumerate(shown):
        name = "reference" if one.side == "reference" else _shortened(one.candidate)
        figure.add_scatter(
            x=[b.stated for b in one.bins],
            y=[b.actual.value for b in one.bins],
            error_y=_bars([b.actual for b in one.bins]),
            text=[_text(b.actual, one.unit, b.actual.documents) for b in one.bins],
            mode="lines+markers",
            line=_line(place),
            name=f"{name}: {_text(one.gap, one.unit, one.gap.documents)} off",
            hovertemplate="%{x:.3g}: %{text}",
        )
    figure.update_xaxes(title=f"{shown[0].stated}, {shown[0].unit}")
    figure.update_yaxes(title=f"{shown[0].actual}, {shown[0].unit}")
    said = f"{100 * shown[0].confidence:g} % intervals; those of one line hold together"
    return _finished(figure, "Calibration", said)


def runnings(shown: Sequence[series.Running], floors: Sequence[series.NoiseFloor]) -> Any:
    """A metric's mean as text arrives, with the band of its interval where both ends are known."""
    go = plotly()
    figure = go.Figure()
    for place, one in enumerate(shown):
        arrived = [point.arrived for point in one.points]
        figures = [point.figure for point in one.points]
        band = [(x, f.low, f.high) for x, f in zip(arrived, figures, strict=True) if f.interval.closed]
        if band:
            figure.add_scatter(
                x=[x for x, _, _ in band] + [x for x, _, _ in reversed(band)],
                y=[high for _, _, high in band] + [low for _, low, _ in reversed(band)],
                fill="toself",
                fillcolor=_faint(place),
                line={"width": 0},
                hoverinfo="skip",
                showlegend=False,
            )
        figure.add_scatter(
            x=arrived,
            y=[f.value for f in figures],
            text=[_text(f, one.unit, f.documents) for f in figures],
            mode="lines+markers",
            line=_line(place),
            name=_name(one),
            hovertemplate=f"%{{x}} {one.per}: %{{text}}",
        )
    first = shown[0]
    _floor(figure, "y", floors)
    figure.update_xaxes(type="log", title=first.per)
    figure.update_yaxes(title=f"mean {first.metric}, {first.unit}", rangemode="tozero")
    return _finished(figure, f"Mean {first.metric} as {first.per} arrive", "each interval holds at its own point")


def _floor(figure: Any, axis: str, floors: Sequence[series.NoiseFloor]) -> None:
    """A dashed line at the largest floor that is known and above zero, named in the legend."""
    known = [floor for floor in floors if floor.mean is not None and floor.mean > 0]
    if not known:
        return
    largest = max(known, key=lambda floor: floor.mean or 0.0)
    line = {"color": "#666666", "dash": "dash", "width": 1}
    (figure.add_vline if axis == "x" else figure.add_hline)(**{axis: largest.mean}, line=line)
    name = f"noise floor {largest.mean:.2g}, {largest.source}"
    figure.add_scatter(x=[None], y=[None], mode="lines", line=line, name=name)


def _bars(figures: Sequence[Figure]) -> dict[str, Any]:
    """Error bars; an open end has none, and the hover text says that it is open."""
    above = [max(f.high - f.value, 0.0) if f.high is not None and f.value is not None else 0.0 for f in figures]
    below = [max(f.value - f.low, 0.0) if f.low is not None and f.value is not None else 0.0 for f in figures]
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1.2, "width": 4}


def _text(figure: Figure, unit: str, documents: int) -> str:
    if figure.value is None:
        return interval_text(figure.interval, unit=unit)
    return " ".join(figure_text(figure.value, figure.interval, unit=unit, documents=documents)).strip()


def _name(one: series.Distribution | series.Profile | series.Running) -> str:
    name = _shortened(one.candidate)
    return f"{name}, {_ENDS[one.series]}" if one.series in _ENDS else name


def _shortened(name: str) -> str:
    """A name for a legend: without markup, which plotly would take from it, and not too long."""
    return _escaped(name if len(name) <= _LONGEST else f"...{name[3 - _LONGEST :]}")


def _escaped(name: str) -> str:
    return printable(name).replace("&", "&amp;").replace("<", "&lt;")


def _line(place: int) -> dict[str, Any]:
    return {"color": COLORS[place % len(COLORS)], "dash": DASHES[place % len(DASHES)], "width": 2}


def _faint(place: int) -> str:
    color = COLORS[place % len(COLORS)]
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"


def _signed_log(value: float) -> float:
    """Where a change of probability lies on the axis: decades beyond the least one, and straight between."""
    size = abs(value) / LEAST_DELTA
    return math.copysign(size if size <= 1 else 1 + math.log10(size), value)


def _finished(figure: Any, title: str, said: str) -> Any:
    figure.update_layout(
        title={"text": title, "font": {"size": 15}, "subtitle": {"text": said, "font": {"size": 12}}},
        template="plotly_white",
        width=_WIDE,
        height=_HIGH,
        margin={"l": 70, "r": 20, "t": 70, "b": 60},
        legend={"orientation": "h", "y": -0.25},
    )
    return figure
