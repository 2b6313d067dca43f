"""Means of values that are estimates themselves, each with a standard error of its own.

Between documents such values vary by the text and by their own errors, so that an interval clustered by document holds
both in expectation. Few documents may by chance agree better than their errors allow: the interval is then widened to
what the errors alone would give.

Where such a mean lies below a certain lower bound of it, its errors were understated. The bound takes its place.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from evalgate.core import Figure
from evalgate.stats.ratio import Floats, t_quantile

_NORMAL = 1e6  # degrees of freedom at which Student's quantile is the normal one


def sampling_error(se: Floats) -> float:
    """Standard error of the mean of n independent estimates, se [n] each their own: sqrt(sum se^2) / n."""
    return float(np.sqrt(np.square(se).sum())) / len(se)


def with_sampling(figure: Figure, se: Floats | None) -> Figure:
    """The mean with an interval at least as wide as the values' own errors make it; an open end stays open."""
    low, high = figure.low, figure.high
    if se is None or figure.se is None:
        return figure
    own = sampling_error(se)
    reach = t_quantile(figure.interval.confidence, _NORMAL) * own
    widened = figure.between(
        None if low is None else min(low, figure.known - reach),
        None if high is None else max(high, figure.known + reach),
    )
    return replace(widened, se=max(figure.se, own))


def not_below(figure: Figure, floor: Figure) -> Figure:
    """The mean, moved up with its interval to `floor`, the mean of certain lower bounds, where it lies below that.

    The interval then starts where the floor's does and ends no earlier than the floor's does; open ends stay open.
    """
    gap = floor.known - figure.known
    if gap <= 0:
        return figure
    high = None if figure.high is None or floor.high is None else max(figure.high + gap, floor.high)
    return replace(figure.between(floor.low, high), value=floor.known)
