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
    for scores in _candidates(table, noise_floor=noise_floor):
        parts = _parts(scores)
        made = [Group(name=part.name, **_counts(scores, part), metrics={}) for part in parts]
        for metric, exactness, series in _series_of(scores, kind):
            for part, group in zip(parts, made, strict=True):
                statistics = _figures(scores, metric, exactness, series, part, confidence=confidence)
                group.metrics[metric.name] = MetricSummary(
                    metric=metric.name,
                    unit=metric.unit,
                    exactness=exactness,
                    statistics={name: StoredFigure.of(figure) for name, figure in statistics.items()},
                )
            del series  # before the next metric's are made
        overall, *domains = made
        if not domains:
            domains = [overall.model_copy(update={"name": scores.domains[0]})]
        found.append((scores.candidate, overall, domains))
    return found


def values(table: pa.Table, *, kind: Kind, noise_floor: float | None) -> Made:
    """The groups of `summarize` without intervals, by candidate and domain (None = overall): what a summary must say.

    Raises:
        ScoreError, UsageError: as `summarize`.
    """
    found: dict[tuple[str, str | None], GroupValues] = {}
    for scores in _candidates(table, noise_floor=noise_floor):
        parts = _parts(scores)
        made = [GroupValues(_counts(scores, part), {}) for part in parts]
        for metric, exactness, series in _series_of(scores, kind):
            for part, group in zip(parts, made, strict=True):
                group.metrics[metric.name] = _values(scores, metric, exactness, series, part)
            del series  # before the next metric's are made
        overall, *domains = made
        found[scores.candidate, None] = overall
        for name, group in zip(scores.domains, domains or [overall], strict=True):
            found[scores.candidate, name] = group
    return found


@dataclass(frozen=True)
class _Part:
    """Rows that make a group. rows: indices, ascending, of those of domain `code`; None = all of them."""

    name: str
    rows: NDArray[np.int32] | None = None
    code: int = -1


def _candidates(table: pa.Table, *, noise_floor: float | None) -> Iterator[Scores]:
    if noise_floor is not None and not (np.isfinite(noise_floor) and noise_floor >= 0):
        raise UsageError(f"the noise floor must be finite and not negative, not {noise_floor}")
    return split_candidates(table, noise_floor=noise_floor)


def _parts(scores: Scores) -> list[_Part]:
    """All rows, and after them those of each domain where there are several."""
    if len(scores.domains) == 1:
        return [_Part("overall")]
    rows = np.argsort(scores.domain, kind="stable").astype(np.int32)
    ends = np.cumsum(np.bincount(scores.domain))
    each = np.split(rows, ends[:-1])
    return [_Part("overall"), *(_Part(name, each[code], code) for code, name in enumerate(scores.domains))]


def _series_of(scores: Scores, kind: Kind) -> Iterator[tuple[Metric, Exactness, Mapping[str, Series]]]:
    """The metrics that the run has, one at a time: the series of all of them are several times the table."""
    for metric in registry().values():
        if kind not in metric.kinds:
            continue
        exactness = metric.exactness(scores)
        if exactness is not None:
            yield metric, exactness, metric.series(scores)
        elif metric.name == HEADLINE[kind]:
            raise ScoreError(
                f"candidate {scores.candidate!r} has no scores for {metric.name} "
                f"(columns {', '.join(metric.columns)}): ask a source that gives them, or run another command",
                candidate=scores.candidate,
            )


def _counts(scores: Scores, part: _Part) -> dict[str, int]:
    """Positions, documents, windows and bytes of a part."""
    rows = slice(None) if part.rows is None else part.rows
    window = scores.window[rows]  # ascending
    return {
        "positions": len(window),
        "documents": int(np.count_nonzero(np.bincount(scores.document[rows]))),
        "windows": 1 + int(np.count_nonzero(window[1:] != window[:-1])),
        "bytes": int(scores.integers("bytes")[rows].sum()),
    }


def _figures(
    scores: Scores,
    metric: Metric,
    exactness: Exactness,
    series: Mapping[str, Series],
    part: _Part,
    *,
    confidence: float,
) -> dict[str, Figure]:
    """A metric's statistics of a part, less those that the run does not have or that are not defined."""
    samples = _samples(scores, metric, exactness, series, part)
    found = {}
    for statistic in _wanted(metric, exactness, series):
        figure = _figure(statistic, samples, confidence=confidence)
        if figure is not None:
            found[statistic.name] = figure
    return found


def _figure(statistic: Statistic, samples: Mapping[str, Sample], *, confidence: float) -> Figure | None:
    sample = samples.get(statistic.series)
    if sample is None:
        return None
    if statistic.other:
        other = samples.get(statistic.other)
        return None if other is None else sample.correlation(other.series, confidence=confidence)
    if statistic.kind == "sampling" and sample.series.se is None:
        return None
    return sample.figure(statistic, confidence=confidence)


def _values(
    scores: Scores, metric: Metric, exactness: Exactness, series: Mapping[str, Series], part: _Part
) -> dict[str, float]:
    """The same without intervals."""
    samples = _samples(scores, metric, exactness, series, part)
    found: dict[str, float] = {}
    for statistic in _wanted(metric, exactness, series):
        sample = samples.get(statistic.series)
        if sample is None or (statistic.kind == "sampling" and sample.series.se is None):
            continue
        if not statistic.other:
            found[statistic.name] = sample.value(statistic)
        elif statistic.other in samples:
            figure = sample.correlation(samples[statistic.other].series)
            found |= {} if figure is None else {statistic.name: figure.known}
    return found


def _samples(
    scores: Scores, metric: Metric, exactness: Exactness, series: Mapping[str, Series], part: _Part
) -> dict[str, Sample]:
    """The samples that have something to divide by: positions that write no byte have no bits per byte."""
    found: dict[str, Sample] = {}
    documents: dict[bool, NDArray[np.int64]] = {}  # by whether the series has rows of its own: windows, not positions
    for name, whole in series.items():
        one, rows = _chosen(scores, whole, part)
        if one.sizes is not None and not one.sizes.any():
            continue
        own = one.rows is not None
        if own or own not in documents:
            documents[own] = scores.document[rows]
        found[name] = Sample(
            one,
            documents[own],
            windows=scores.window[rows],
            support=metric.support_of(name),
            exactness=exactness,
        )
    return found


def _chosen(
    scores: Scores, series: Series, part: _Part
) -> tuple[Series, NDArray[np.int32] | NDArray[np.int64] | slice]:
    """A series' values in a part, and the rows of `scores` that they belong to."""
    if series.rows is not None:
        one = select(series, None if part.rows is None else scores.domain == part.code)
        return one, slice(None) if one.rows is None else one.rows
    if part.rows is None:
        return series, slice(None)
    return series.at(part.rows), part.rows


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
