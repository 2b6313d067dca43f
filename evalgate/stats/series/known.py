"""Which series of a metric a candidate's table has: its values, or the ends of intervals where it has bounds alone."""

from __future__ import annotations

from dataclasses import dataclass

from evalgate.core import Exactness
from evalgate.errors import UsageError
from evalgate.metrics import Metric, Scores, Series, get
from evalgate.stats.intervals import Sample

ENDS = ("low", "high")


@dataclass(frozen=True)
class KnownSeries:
    """One series of a metric for one candidate, ready to be averaged or cut.

    name: `value`, or `low` or `high` where only bounds are known, or another series of the metric (`difference`).
    """

    scores: Scores
    metric: Metric
    name: str
    series: Series
    exactness: Exactness

    def sample(self) -> Sample:
        """All of its values, with the documents and windows that they come from."""
        rows = slice(None) if self.series.rows is None else self.series.rows
        return Sample(
            self.series,
            self.scores.document[rows],
            windows=self.scores.window[rows],
            support=self.metric.support_of(self.name),
            exactness=self.exactness,
        )


def ends_of(scores: Scores, metric: str) -> tuple[str, ...]:
    """What `known_series` can be asked for: the primary series, or `low` (and `high`) where only bounds are known.

    Empty where the candidate has no scores for the metric.

    Raises:
        UsageError: there is no such metric.
        ScoreError: a bad value in a column that is needed.
    """
    chosen = get(metric)
    if chosen.exactness(scores) is None:
        return ()
    found = chosen.series(scores)
    return (chosen.primary,) if chosen.primary in found else tuple(name for name in ENDS if name in found)


def known_series(scores: Scores, metric: str, series: str | None = None) -> KnownSeries:
    """A series of a metric; None = its primary one, or the lower bounds where only bounds are known.

    Raises:
        UsageError: no such metric, or the candidate does not have that series.
        ScoreError: a bad value in a column that is needed.
    """
    chosen = get(metric)
    exactness = chosen.exactness(scores)
    if exactness is None:
        raise UsageError(f"candidate {scores.candidate!r} has no scores for {metric}: choose another metric")
    found = chosen.series(scores)
    wanted = series or (chosen.primary if chosen.primary in found else ENDS[0])
    if wanted not in found:
        raise UsageError(f"{metric} has no series {wanted!r} here: choose one of {', '.join(found)}")
    return KnownSeries(scores, chosen, wanted, found[wanted], exactness)
