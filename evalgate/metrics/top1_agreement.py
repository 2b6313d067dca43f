"""Top-1 agreement: the fraction of positions where argmax p = argmax q under the deterministic tie order.

Where an endpoint's answers leave it open at some positions (a tie at the end of its list), they count as an interval.
"""

from collections.abc import Mapping

import numpy as np

from evalgate.metrics import Metric, Scores, Series, column_series, mean
from evalgate.table import ID, Range


def _series(scores: Scores) -> Mapping[str, Series]:
    if not (scores.has("ref_top1") and scores.has("cand_top1")):
        return column_series("top1_agreement")(scores)
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
    instead="top1_agreement",
    statistics=(mean(),),
    support=(0.0, 1.0),
    ranges={"top1": ID, "top1_agreement": Range(0.0, 1.0, whole=True)},
)
