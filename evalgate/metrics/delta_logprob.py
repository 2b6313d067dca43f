"""Change of the actual token's log-probability, log q(t_i) - log p(t_i), in nats."""

from collections.abc import Mapping

from evalgate.metrics import Metric, Scores, Series, Statistic, mean, percentiles


def _series(scores: Scores) -> Mapping[str, Series]:
    delta = scores.floats("ref_nll") - scores.floats("cand_nll")
    return {"value": Series(delta), "square": Series(delta * delta)}


METRIC = Metric(
    name="delta_logprob",
    unit="nats",
    better="zero",
    kinds=("kl", "agree"),
    columns=("ref_nll", "cand_nll"),
    pair=True,
    series=_series,
    known_only=True,
    statistics=(
        mean(),
        Statistic("max", "max"),
        *percentiles(99.9, 99, 95, 90, 75, 50, 25, 10, 5, 1, 0.1),
        Statistic("min", "min"),
        Statistic("rms", series="square", scale="sqrt"),
    ),
)
