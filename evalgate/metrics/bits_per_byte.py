"""Bits per byte, sum nll / (ln 2 * UTF-8 bytes of the scored text): comparable across tokenizers.

Where some positions are known as intervals alone, `candidate_low` and `candidate_high` stand in.
"""

from collections.abc import Mapping
from math import log

from evalgate.metrics import Metric, Scores, Series, column_series, mean


def _series(scores: Scores) -> Mapping[str, Series]:
    size = scores.floats("bytes")
    if scores.form("cand_nll") == "bounded":
        ends = column_series("cand_nll")(scores)
        return {f"candidate_{end}": Series(found.values / log(2.0), sizes=size) for end, found in ends.items()}
    candidate = scores.floats("cand_nll") / log(2.0)
    found = {"candidate": Series(candidate, sizes=size)}
    if scores.has("ref_nll"):
        reference = scores.floats("ref_nll") / log(2.0)
        found |= {
            "reference": Series(reference, sizes=size),
            "difference": Series(candidate - reference, sizes=size),
        }
    return found


METRIC = Metric(
    name="bits_per_byte",
    unit="bits per byte",
    better="lower",
    kinds=("kl", "agree", "ppl"),
    columns=("cand_nll", "bytes"),
    pair=False,
    series=_series,
    statistics=tuple(mean(name, series=name) for name in ("candidate", "reference", "difference")),
    primary="candidate",
    least=dict.fromkeys(("candidate", "reference", "candidate_low", "candidate_high"), 0.0),
)
