"""Greedy match length: per window, scored positions until the first top-1 disagreement.

A window without a disagreement counts with all its positions, so the figure depends on the window policy.
"""

from collections.abc import Mapping

import numpy as np

from evalgate.metrics import Metric, Scores, Series, Statistic, mean, percentiles


def _series(scores: Scores) -> Mapping[str, Series]:
    differs = scores.integers("ref_top1") != scores.integers("cand_top1")
    starts = scores.window_starts()
    ends = np.r_[starts[1:], len(scores)]
    breaks = np.flatnonzero(differs)
    # First disagreement at or after each window's start; windows without one run to their end.
    index = np.searchsorted(breaks, starts)
    first = np.r_[breaks, len(scores)][index]
    return {"value": Series((np.minimum(first, ends) - starts).astype(np.float64), rows=starts)}


METRIC = Metric(
    name="greedy_match_length",
    unit="tokens",
    better="higher",
    kinds=("kl", "agree"),
    columns=("ref_top1", "cand_top1"),
    pair=True,
    series=_series,
    known_only=True,
    statistics=(mean(), *percentiles(10, 50, 90), Statistic("min", "min"), Statistic("max", "max")),
    per="window",
    support=(0.0, float("inf")),
)
