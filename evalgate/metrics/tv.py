"""Total variation distance, sum_v |p_v - q_v| / 2; 1 - tv is the acceptance rate of exact speculative sampling."""

from evalgate.metrics import KL_STATISTICS, Metric, column_series
from evalgate.table import Range

METRIC = Metric(
    name="tv",
    unit="fraction",
    better="lower",
    kinds=("kl", "agree"),
    columns=("tv",),
    pair=True,
    series=column_series("tv"),
    statistics=KL_STATISTICS,
    support=(0.0, 1.0),
    ranges={"tv": Range(0.0, 1.0)},
    listed="interval",
)
