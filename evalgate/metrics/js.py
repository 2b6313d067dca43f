"""Jensen-Shannon divergence of reference and candidate, in nats: symmetric, at most ln 2 (Lin 1991)."""

from math import inf, log, nextafter

from evalgate.metrics import KL_STATISTICS, Metric, column_series
from evalgate.table import Range

METRIC = Metric(
    name="js",
    unit="nats",
    better="lower",
    kinds=("kl",),
    columns=("js",),
    pair=True,
    series=column_series("js"),
    statistics=KL_STATISTICS,
    support=(0.0, nextafter(log(2.0), inf)),
    ranges={"js": Range(0.0, log(2.0))},
    listed="interval",
)
