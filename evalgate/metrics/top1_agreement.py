"""Top-1 agreement: the fraction of positions where argmax p = argmax q under the deterministic tie order."""

from collections.abc import Mapping

import numpy as np

from evalgate.metrics import Metric, Scores, Series, mean


def _series(scores: Scores) -> Mapping[str, Series]:
    same = scores.integers("ref_top1") == scores.integers("cand_top1")
    return {"value": Series(same.astype(np.float64))}


METRIC = Metric(
    name="top1_agreement",
    unit="fraction",
    better="higher",
    kinds=("kl", "agree"),
    columns=("ref_top1", "cand_top1"),
    pair=True,
    series=_series,
    statistics=(mean(),),
    support=(0.0, 1.0),
)
