"""The whole token-score table as the groups of a summary: overall and by domain, for every candidate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Estimate, Exactness
from evalgate.errors import ScoreError, UsageError
from evalgate.metrics import Kind, Metric, Scores, Series, Statistic, registry, split_candidates
from evalgate.stats.bootstrap import RESAMPLES, DocumentBootstrap, correlation_estimate, percentile_estimates
from evalgate.stats.clustered import check_confidence, clustered_mean
from evalgate.stats.estimated import sampling_error, with_sampling
from evalgate.stats.scale import scaled
from evalgate.summary import Figure, Group, MetricSummary

if TYPE_CHECKING:
    import pyarrow as pa

HEADLINE: Mapping[Kind, str] = {"kl": "kl", "agree": "top1_agreement", "ppl": "perplexity"}


def summarize(
    table: pa.Table,
    *,
    kind: Kind,
    noise_floor: float | None,
    seed: int,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
) -> list[tuple[str, Group, list[Group]]]:
    """(candidate, overall, domains) for every candidate of a token-score table (`core.table_schema`).

    noise_floor: nats; None = not measured, which leaves `flip` out. A metric whose columns are absent is left out;
    a bounded one gets NAME_low and NAME_high in place of NAME; a single domain repeats the overall figures.

    Raises:
        ScoreError: a needed column has a missing or non-finite value, or the run's main metric is absent.
        UsageError: confidence or noise floor make no sense.
    """
    check_confidence(confidence)
    if noise_floor is not None and not (np.isfinite(noise_floor) and noise_floor >= 0):
        raise UsageError(f"the noise floor must be finite and not negative, not {noise_floor}")
    found = []
    for scores in split_candidates(table, noise_floor=noise_floor):
        metrics = _series_of(scores, kind)
        group = _GroupMaker(scores, metrics, seed=seed, confidence=confidence, resamples=resamples)
        overall = group.make("overall", None)
        if len(scores.domains) == 1:
            domains = [overall.model_copy(update={"name": scores.domains[0]})]
        else:
            domains = [group.make(name, scores.domain == code) for code, name in enumerate(scores.domains)]
        found.append((scores.candidate, overall, domains))
    return found


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
        seed: int,
        confidence: float,
        resamples: int,
    ) -> None:
        self._scores = scores
        self._metrics = metrics
        self._seed = seed
        self._confidence = confidence
        self._resamples = resamples
        self._bytes = scores.integers("bytes")

    def make(self, name: str, keep: NDArray[np.bool_] | None) -> Group:
        """The group of the rows that `keep` [n] selects, None = all."""
        rows = slice(None) if keep is None else keep
        window, document = self._scores.window[rows], self._scores.document[rows]
        return Group(
            name=name,
            positions=len(window),
            documents=len(np.unique(document)),
            windows=len(np.unique(window)),
            bytes=int(self._bytes[rows].sum()),
            metrics=self._metric_summaries(keep),
        )

    def _metric_summaries(self, keep: NDArray[np.bool_] | None) -> dict[str, MetricSummary]:
        found = {}
        for metric, exactness, series in self._metrics:
            chosen = {name: select(s, keep) for name, s in series.items()}
            statistics = self._statistics(metric, exactness, chosen, keep)
            found[metric.name] = MetricSummary(
                metric=metric.name,
                unit=metric.unit,
                exactness=exactness,
                statistics={name: _figure(e) for name, e in statistics.items()},
            )
        return found

    def _statistics(
        self, metric: Metric, exactness: Exactness, series: Mapping[str, Series], keep: NDArray[np.bool_] | None
    ) -> dict[str, Estimate]:
        wanted = _expand(metric.statistics, series) if exactness == "bounded" else metric.statistics
        quantiles: dict[tuple[str, float], Estimate] = {}
        found = {}
        for statistic in wanted:
            if statistic.series not in series or (statistic.other and statistic.other not in series):
                continue
            one = series[statistic.series]
            if statistic.kind == "percentile" and (statistic.series, statistic.level) not in quantiles:
                levels = [s.level for s in wanted if s.kind == "percentile" and s.series == statistic.series]
                estimates = percentile_estimates(
                    one.values,
                    self._bootstrap(one, keep),
                    levels=levels,
                    se=one.se,
                    confidence=self._confidence,
                    exactness=exactness,
                )
                quantiles |= {(statistic.series, q): e for q, e in zip(levels, estimates, strict=True)}
            estimate = (
                quantiles[statistic.series, statistic.level]
                if statistic.kind == "percentile"
                else self._estimate(statistic, metric, exactness, series, keep)
            )
            if estimate is not None:
                found[statistic.name] = estimate
        return found

    def _estimate(
        self,
        statistic: Statistic,
        metric: Metric,
        exactness: Exactness,
        series: Mapping[str, Series],
        keep: NDArray[np.bool_] | None,
    ) -> Estimate | None:
        one = series[statistic.series]
        documents = self._documents(one, keep)
        if statistic.kind == "mean":
            estimate = clustered_mean(
                one.values, documents, sizes=one.sizes, confidence=self._confidence, exactness=exactness
            )
            return scaled(with_sampling(estimate, one.se), statistic.scale, support=metric.support)
        if statistic.kind == "correlation":
            other = series[statistic.other]
            return correlation_estimate(
                one.values,
                other.values,
                self._bootstrap(one, keep),
                confidence=self._confidence,
                exactness=exactness,
            )
        if statistic.kind == "sampling":
            if one.se is None:
                return None
            value = sampling_error(one.se)
        else:
            value = float(one.values.min() if statistic.kind == "min" else one.values.max())
        clusters = len(np.unique(documents))
        return Estimate(
            value,
            None,
            None,
            None,
            n=len(one.values),
            clusters=clusters,
            method="none",
            confidence=self._confidence,
            exactness=exactness,
        )

    def _documents(self, series: Series, keep: NDArray[np.bool_] | None) -> NDArray[np.int64]:
        if series.rows is not None:
            return self._scores.document[series.rows]
        return self._scores.document if keep is None else self._scores.document[keep]

    def _bootstrap(self, series: Series, keep: NDArray[np.bool_] | None) -> DocumentBootstrap:
        return DocumentBootstrap.of(self._documents(series, keep), seed=self._seed, resamples=self._resamples)


def select(series: Series, keep: NDArray[np.bool_] | None) -> Series:
    """The series' values whose rows `keep` [n] selects, None = all of them."""
    if keep is None:
        return series
    chosen = keep if series.rows is None else keep[series.rows]
    return Series(
        values=series.values[chosen],
        sizes=None if series.sizes is None else series.sizes[chosen],
        rows=None if series.rows is None else series.rows[chosen],
        se=None if series.se is None else series.se[chosen],
    )


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


def _figure(estimate: Estimate) -> Figure:
    return Figure(
        value=estimate.value,
        low=estimate.low,
        high=estimate.high,
        se=estimate.se,
        confidence=estimate.confidence,
        method=estimate.method,
    )
