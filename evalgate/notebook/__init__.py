"""A run as a notebook shows it: its headline as HTML, and `run.plot`.

`evalgate.compare`, `perplexity` and `load` return a `ShownRun`. Nothing here computes a figure: sentences and tables
come from the summary, and plots draw what `evalgate.stats.series` returns, as report.html does.
"""

from evalgate.notebook.plots import Plots
from evalgate.notebook.run import ShownRun

__all__ = ["Plots", "ShownRun"]
