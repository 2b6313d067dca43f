"""Means of values that are estimates themselves, each with a standard error of its own.

Between documents such values vary by the text and by their own errors, so that an interval clustered by document holds
both in expectation. Few documents may by chance agree better than their errors allow: the interval is then widened to
what the errors alone would give.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from evalgate.core import Estimate
from evalgate.stats.clustered import Floats, t_quantile

_NORMAL = 1e6  # degrees of freedom at which Student's quantile is the normal one


def sampling_error(se: Floats) -> float:
    """Standard error of the mean of n independent estimates, se [n] each their own: sqrt(sum se^2) / n."""
    return float(np.sqrt(np.square(se).sum())) / len(se)


def with_sampling(estimate: Estimate, se: Floats | None) -> Estimate:
    """The mean with an interval at least as wide as the values' own errors make it; unknown stays unknown."""
    if se is None or estimate.se is None or estimate.low is None or estimate.high is None:
        return estimate
    own = sampling_error(se)
    reach = t_quantile(estimate.confidence, _NORMAL) * own
    return replace(
        estimate,
        se=max(estimate.se, own),
        low=min(estimate.low, estimate.value - reach),
        high=max(estimate.high, estimate.value + reach),
    )
