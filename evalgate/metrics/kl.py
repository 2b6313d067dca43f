"""Kullback-Leibler divergence of the candidate from the reference, sum_v p_v (log p_v - log q_v), in nats."""

from evalgate.metrics import KL_STATISTICS, Metric, Statistic, column_series, mean
from evalgate.table import MOST_NATS, Range

METRIC = Metric(
    name="kl",
    unit="nats",
    better="lower",
    kinds=("kl",),
    columns=("kl",),
    pair=True,
    series=column_series("kl"),
    statistics=(*KL_STATISTICS, mean("mean_low", series="low"), Statistic("sampling_se", "sampling")),
    support=(0.0, float("inf")),
    ranges={"kl": Range(0.0, MOST_NATS)},
    listed="lower",
)
