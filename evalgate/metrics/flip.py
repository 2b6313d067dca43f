"""Flips: top-1 differs AND the reference's margin (top-1 minus top-2 logprob) is above the noise floor."""

from collections.abc import Mapping

import numpy as np

from evalgate.errors import UsageError
from evalgate.metrics import Metric, Scores, Series, mean
from evalgate.table import MOST_NATS, Range


def _series(scores: Scores) -> Mapping[str, Series]:
    if scores.noise_floor is None:
        raise UsageError("flip needs a noise floor: measure the reference against itself and pass the result")
    differs = scores.integers("ref_top1") != scores.integers("cand_top1")
    decided = scores.floats("ref_margin") > scores.noise_floor
    return {"value": Series((differs & decided).astype(np.float64))}


METRIC = Metric(
    name="flip",
    unit="fraction",
    better="lower",
    kinds=("kl", "agree"),
    columns=("ref_top1", "cand_top1", "ref_margin"),
    pair=True,
    series=_series,
    known_only=True,
    statistics=(mean(),),
    support=(0.0, 1.0),
    needs_floor=True,
    ranges={"margin": Range(0.0, MOST_NATS)},
)
