"""A run that shows itself."""

from __future__ import annotations

from dataclasses import fields

from evalgate.notebook.html import run_html
from evalgate.notebook.plots import Plots
from evalgate.store.runs import Run


class ShownRun(Run):
    """A run that a notebook shows by itself, with its plots under `plot`.

    run = evalgate.load("runs/first")
    run                # the headline, and the figures that people quote
    run.plot.kl()      # a plotly figure
    """

    @classmethod
    def of(cls, run: Run) -> ShownRun:
        """The same run, shown."""
        return cls(**{field.name: getattr(run, field.name) for field in fields(Run)})

    @property
    def plot(self) -> Plots:
        """Plotly figures of this run; see `Plots`."""
        return Plots(self)

    def _repr_html_(self) -> str:
        return run_html(self.summary)
