"""Negative log-likelihood of the actual token, -log q(t_i), in nats; `difference` is candidate minus reference.

Where some positions are known as intervals alone, `low` and `high` stand in for the value.
"""

from collections.abc import Mapping

from evalgate.metrics import Metric, Scores, Series, Statistic, column_series, mean, percentiles
from evalgate.table import MOST_NATS, ROUNDING, Range


def _series(scores: Scores) -> Mapping[str, Series]:
    if scores.form("cand_nll") == "bounded":
        return column_series("cand_nll")(scores)
    candidate = scores.floats("cand_nll")
    found = {"value": Series(candidate)}
    if scores.has("ref_nll"):
        reference = scores.floats("ref_nll")
        found |= {"reference": Series(reference), "difference": Series(candidate - reference)}
    return found


METRIC = Metric(
    name="nll",
    unit="nats",
    better="lower",
    kinds=("kl", "agree", "ppl"),
    columns=("cand_nll",),
    pair=False,
    series=_series,
    statistics=(
        mean(),
        mean("reference", series="reference"),
        mean("difference", series="difference"),
        *percentiles(50, 90, 95, 99, 99.9),
        Statistic("max", "max"),
    ),
    least={"value": 0.0, "reference": 0.0, "low": 0.0, "high": 0.0},
    ranges={"nll": Range(-ROUNDING, MOST_NATS)},
)
