"""Kullback-Leibler divergence of the reference from the candidate, sum_v q_v (log q_v - log p_v), in nats."""

from evalgate.metrics import KL_STATISTICS, Metric, column_series
from evalgate.table import MOST_NATS, Range

METRIC = Metric(
    name="reverse_kl",
    unit="nats",
    better="lower",
    kinds=("kl",),
    columns=("reverse_kl",),
    pair=True,
    series=column_series("reverse_kl"),
    statistics=KL_STATISTICS,
    support=(0.0, float("inf")),
    ranges={"reverse_kl": Range(0.0, MOST_NATS)},
    listed="none",
)
