"""Perplexity, exp(mean nll) over all scored positions, with the candidate's ratio to the reference.

The ratio's interval is that of the paired mean nll difference, taken through exp. `correlation` is Pearson's,
of the two sides' log-probabilities position by position, as llama-perplexity prints it. Where some positions are
known as intervals alone, `candidate_low` and `candidate_high` stand in for the candidate's.
"""

from collections.abc import Mapping

from evalgate.metrics import Metric, Scores, Series, Statistic, column_series


def _series(scores: Scores) -> Mapping[str, Series]:
    if scores.form("cand_nll") == "bounded":
        return {f"candidate_{end}": series for end, series in column_series("cand_nll")(scores).items()}
    candidate = scores.floats("cand_nll")
    found = {"candidate": Series(candidate)}
    if scores.has("ref_nll"):
        reference = scores.floats("ref_nll")
        found |= {"reference": Series(reference), "log_ratio": Series(candidate - reference)}
    return found


METRIC = Metric(
    name="perplexity",
    unit="perplexity",
    better="lower",
    kinds=("kl", "agree", "ppl"),
    columns=("cand_nll",),
    pair=False,
    series=_series,
    statistics=(
        Statistic("candidate", series="candidate", scale="exp"),
        Statistic("reference", series="reference", scale="exp"),
        Statistic("ratio", series="log_ratio", scale="exp"),
        Statistic("log_ratio", series="log_ratio"),
        Statistic("correlation", "correlation", "candidate", other="reference"),
    ),
    primary="candidate",
    least=dict.fromkeys(("candidate", "reference", "candidate_low", "candidate_high"), 0.0),
)
