"""Top-k overlap, |top_k(p) & top_k(q)| / k under the deterministic tie order."""

from evalgate.metrics import Metric, column_series, mean
from evalgate.table import Range

METRIC = Metric(
    name="topk_overlap",
    unit="fraction",
    better="higher",
    kinds=("kl", "agree"),
    columns=("topk_overlap",),
    pair=True,
    series=column_series("topk_overlap"),
    statistics=(mean(),),
    support=(0.0, 1.0),
    ranges={"topk_overlap": Range(0.0, 1.0)},
)
