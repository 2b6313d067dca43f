"""Plots as SVG, made by hand: scales, and a chart with axes and marks.

A chart's colours, fonts and line widths are classes that a page's style sheet sets (`_page/plots.css`), so that one
drawing serves light and dark. `standalone` puts that style sheet into a drawing that has to stand alone.
"""

from evalgate.reports._svg.chart import Chart, Mark, Span, standalone
from evalgate.reports._svg.scales import Band, Linear, Log, Scale, SignedLog, Tick, number, power

__all__ = [
    "Band",
    "Chart",
    "Linear",
    "Log",
    "Mark",
    "Scale",
    "SignedLog",
    "Span",
    "Tick",
    "number",
    "power",
    "standalone",
]
