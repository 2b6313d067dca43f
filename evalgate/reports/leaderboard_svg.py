"""The plot of mean KL against size as an SVG file, in the theme of whoever looks at it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evalgate.errors import UsageError
from evalgate.reports import Report
from evalgate.reports._pareto import plot

if TYPE_CHECKING:
    from evalgate.leaderboard import Leaderboard

NOTHING = "there is nothing to plot: no candidate with a KL has a known size; give sizes with `bytes` in a list"


def render(board: Leaderboard) -> str:
    """The file. Raises UsageError where no candidate can be drawn."""
    drawn = plot(board, alone=True)
    if not drawn:
        raise UsageError(NOTHING)
    return drawn + "\n"


REPORT = Report("sweep", render)
