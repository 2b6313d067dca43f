"""Change of the actual token's probability, q(t_i) - p(t_i): llama-perplexity's delta p, as a fraction."""

from collections.abc import Mapping

import numpy as np

from evalgate.metrics import Metric, Scores, Series, Statistic, mean, percentiles


def _series(scores: Scores) -> Mapping[str, Series]:
    delta = np.exp(-scores.floats("cand_nll")) - np.exp(-scores.floats("ref_nll"))
    return {"value": Series(delta), "square": Series(delta * delta)}


METRIC = Metric(
    name="delta_prob",
    unit="fraction",
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
    support=(-1.0, 1.0),
)
