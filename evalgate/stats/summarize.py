"""The whole token-score table as the groups of a summary: overall and by domain, for every candidate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Exactness, Figure
from evalgate.errors import ScoreError, UsageError
from evalgate.metrics import Kind, Metric, Scores, Series, Statistic, registry, split_candidates
from evalgate.stats.intervals import Sample
from evalgate.stats.ratio import check_confidence
from evalgate.summary import Group, MetricSummary, StoredFigure

if TYPE_CHECKING:
    import pyarrow as pa

HEADLINE: Mapping[Kind, str] = {"kl": "kl", "agree": "top1_agreement", "ppl": "perplexity"}


@dataclass(frozen=True)
class GroupValues:
    """A group without intervals. counts: as `Group` names them. metrics: metric -> statistic -> value."""

    counts: dict[str, int]
    metrics: dict[str, dict[str, float]]


Made = Mapping[tuple[str, str | None], GroupValues]  # by candidate and domain, None = overall


def summarize(
    table: pa.Table,
    *,
    kind: Kind,
    noise_floor: float | None,
    confidence: float = 0.95,
) -> list[tuple[str, Group, list[Group]]]:
    """(candidate, overall, domains) for every candidate of a token-score table (`evalgate.table`).

    noise_floor: nats; None = not measured, which leaves `flip` out. A metric whose columns are absent is left out;
    a bounded one gets NAME_low and NAME_high in place of NAME; a single domain repeats the overall figures.

    Raises:
        ScoreError: a needed column has a missing or non-finite value, or the run's main metric is absent.
        UsageError: confidence or noise floor make no sense.
    """
    check_confidence(confidence)
    found = []
    for scores, group in _makers(table, kind=kind, noise_floor=noise_floor, confidence=confidence):
        overall = group.make("overall", None)
        if len(scores.domains) == 1:
            domains = [overall.model_copy(update={"name": scores.domains[0]})]
        else:
            domains = [group.make(name, scores.domain == code) for code, name in enumerate(scores.domains)]
        found.append((scores.candidate, overall, domains))
    return found


def values(table: pa.Table, *, kind: Kind, noise_floor: float | None) -> Made:
    """The groups of `summarize` without intervals, by candidate and domain (None = overall): what a summary must say.

    Raises:
        ScoreError, UsageError: as `summarize`.
    """
    found: dict[tuple[str, str | None], GroupValues] = {}
    for scores, group in _makers(table, kind=kind, noise_floor=noise_floor, confidence=0.95):
        for name, keep in [(None, None), *((d, scores.domain == code) for code, d in enumerate(scores.domains))]:
            found[scores.candidate, name] = GroupValues(group.counts(keep), group.values(keep))
    return found


def _makers(
    table: pa.Table, *, kind: Kind, noise_floor: float | None, confidence: float
) -> Iterator[tuple[Scores, _GroupMaker]]:
    if noise_floor is not None and not (np.isfinite(noise_floor) and noise_floor >= 0):
        raise UsageError(f"the noise floor must be finite and not negative, not {noise_floor}")
    for scores in split_candidates(table, noise_floor=noise_floor):
        yield scores, _GroupMaker(scores, _series_of(scores, kind), confidence=confidence)


def _series_of(scores: Scores, kind: Kind) -> list[tuple[Metric, Exactness, Mapping[str, Series]]]:
    found = []
    for metric in registry().values():
        if kind not in metric.kinds:
            continue
        exactness = metric.exactness(scores)
        if exactness is not None:
            found.append((metric, exactness, metric.series(scores)))
        elif metric.name == HEADLINE[kind]:
            raise ScoreError(
                f"candidate {scores.candidate!r} has no scores for {metric.name} "
                f"(columns {', '.join(metric.columns)}): ask a source that gives them, or run another command",
                candidate=scores.candidate,
            )
    return found


class _GroupMaker:
    """Makes one candidate's groups from series that were computed once over all its rows."""

    def __init__(
        self,
        scores: Scores,
        metrics: list[tuple[Metric, Exactness, Mapping[str, Series]]],
        *,
        confidence: float,
    ) -> None:
        self._scores = scores
        self._metrics = metrics
        self._confidence = confidence
        self._bytes = scores.integers("bytes")

    def make(self, name: str, keep: NDArray[np.bool_] | None) -> Group:
        """The group of the rows that `keep` [n] selects, None = all."""
        return Group(name=name, **self.counts(keep), metrics=self._metric_summaries(keep))

    def counts(self, keep: NDArray[np.bool_] | None) -> dict[str, int]:
        """Positions, documents, windows and bytes of the rows that `keep` [n] selects."""
        rows = slice(None) if keep is None else keep
        window, document = self._scores.window[rows], self._scores.document[rows]
        return {
            "positions": len(window),
            "documents": len(np.unique(document)),
            "windows": len(np.unique(window)),
            "bytes": int(self._bytes[rows].sum()),
        }

    def _metric_summaries(self, keep: NDArray[np.bool_] | None) -> dict[str, MetricSummary]:
        found = {}
        for metric, exactness, series in self._metrics:
            chosen = {name: select(s, keep) for name, s in series.items()}
            statistics = self._statistics(metric, exactness, chosen, keep)
            found[metric.name] = MetricSummary(
                metric=metric.name,
                unit=metric.unit,
                exactness=exactness,
                statistics={name: StoredFigure.of(figure) for name, figure in statistics.items()},
            )
        return found

    def values(self, keep: NDArray[np.bool_] | None) -> dict[str, dict[str, float]]:
        """Metric -> statistic -> value, without intervals, of the rows that `keep` [n] selects."""
        found: dict[str, dict[str, float]] = {}
        for metric, exactness, series in self._metrics:
            chosen = {name: select(s, keep) for name, s in series.items()}
            samples = self._samples(metric, exactness, chosen, keep)
            own = found.setdefault(metric.name, {})
            for statistic in _wanted(metric, exactness, chosen):
                sample = samples.get(statistic.series)
                if sample is None or (statistic.kind == "sampling" and sample.series.se is None):
                    continue
                if not statistic.other:
                    own[statistic.name] = sample.value(statistic)
                elif statistic.other in samples:
                    figure = sample.correlation(samples[statistic.other].series)
                    own |= {} if figure is None else {statistic.name: figure.known}
        return found

    def _statistics(
        self, metric: Metric, exactness: Exactness, series: Mapping[str, Series], keep: NDArray[np.bool_] | None
    ) -> dict[str, Figure]:
        samples = self._samples(metric, exactness, series, keep)
        found = {}
        for statistic in _wanted(metric, exactness, series):
            figure = self._figure(statistic, samples)
            if figure is not None:
                found[statistic.name] = figure
        return found

    def _samples(
        self, metric: Metric, exactness: Exactness, series: Mapping[str, Series], keep: NDArray[np.bool_] | None
    ) -> dict[str, Sample]:
        """The samples that have something to divide by: positions that write no byte have no bits per byte."""
        return {
            name: Sample(
                one,
                self._of(self._scores.document, one, keep),
                windows=self._of(self._scores.window, one, keep),
                support=metric.support_of(name),
                exactness=exactness,
            )
            for name, one in series.items()
            if one.sizes is None or one.sizes.any()
        }

    def _figure(self, statistic: Statistic, samples: Mapping[str, Sample]) -> Figure | None:
        """The statistic, None where the run does not have it or it is not defined."""
        sample = samples.get(statistic.series)
        if sample is None:
            return None
        if statistic.other:
            other = samples.get(statistic.other)
            return None if other is None else sample.correlation(other.series, confidence=self._confidence)
        if statistic.kind == "sampling" and sample.series.se is None:
            return None
        return sample.figure(statistic, confidence=self._confidence)

    @staticmethod
    def _of(column: NDArray[np.int64], series: Series, keep: NDArray[np.bool_] | None) -> NDArray[np.int64]:
        """A key column's codes for the values of a series that `select` has cut to `keep`."""
        if series.rows is not None:
            return column[series.rows]
        return column if keep is None else column[keep]


def select(series: Series, keep: NDArray[np.bool_] | None) -> Series:
    """The series' values whose rows `keep` [n] selects, None = all of them."""
    if keep is None:
        return series
    return series.at(keep if series.rows is None else keep[series.rows])


def _wanted(metric: Metric, exactness: Exactness, series: Mapping[str, Series]) -> tuple[Statistic, ...]:
    return _expand(metric.statistics, series) if exactness == "bounded" else metric.statistics


def _expand(statistics: tuple[Statistic, ...], series: Mapping[str, Series]) -> tuple[Statistic, ...]:
    """Each statistic; those of the two ends where its series is an interval (SERIES_low, or low for value)."""
    found = []
    for statistic in statistics:
        if statistic.series in series:
            found.append(statistic)
            continue
        for side in ("low", "high"):
            name = side if statistic.series == "value" else f"{statistic.series}_{side}"
            if name in series:
                found.append(replace(statistic, name=f"{statistic.name}_{side}", series=name))
    return tuple(found)
