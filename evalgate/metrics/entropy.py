"""Entropy of both distributions, in nats; `difference` is candidate minus reference."""

from collections.abc import Mapping

from evalgate.metrics import Metric, Scores, Series, mean
from evalgate.table import ROUNDING, Range


def _series(scores: Scores) -> Mapping[str, Series]:
    candidate = scores.floats("cand_entropy")
    found = {"candidate": Series(candidate)}
    if scores.has("ref_entropy"):
        reference = scores.floats("ref_entropy")
        found |= {"reference": Series(reference), "difference": Series(candidate - reference)}
    return found


METRIC = Metric(
    name="entropy",
    unit="nats",
    better="zero",
    kinds=("kl", "agree", "ppl"),
    columns=("cand_entropy",),
    pair=False,
    series=_series,
    known_only=True,
    statistics=tuple(mean(name, series=name) for name in ("candidate", "reference", "difference")),
    primary="candidate",
    least={"candidate": 0.0, "reference": 0.0},
    ranges={"entropy": Range(-ROUNDING, float("inf"))},
    listed="none",
)
