"""Regret, log p(argmax p) - log p(argmax q) in nats: what the candidate's choice costs under the reference."""

from evalgate.metrics import Metric, Statistic, column_series, mean, percentiles
from evalgate.table import MOST_NATS, Range

METRIC = Metric(
    name="regret",
    unit="nats",
    better="lower",
    kinds=("kl", "agree"),
    columns=("regret",),
    pair=True,
    series=column_series("regret"),
    statistics=(mean(), *percentiles(90, 95, 99, 99.9), Statistic("max", "max")),
    support=(0.0, float("inf")),
    ranges={"regret": Range(0.0, MOST_NATS)},
)
