"""Seeded bootstrap over documents: percentiles and correlations.

A resample draws G documents with replacement; its percentile is that of the positions of the drawn documents,
each counted as often as its document was drawn. It is found exactly, without building the resample: positions
are sorted once and cut into blocks, one matrix product gives every resample's count per block, and only the block
that holds the rank is looked into. Cost: resamples x (documents x blocks) multiply-adds; memory is bounded by chunks.

Intervals are percentile intervals at levels widened for few documents (Hesterberg 2015, "expanded percentile"):
the tail area becomes Phi(-sqrt(G / (G-1)) * t_{G-1}). Those of percentiles are extended to the limits that test
inversion gives (`OrderedValues.limits`): where few documents carry the tail, a resample cannot see beyond them and
a bootstrap alone covers the 99th percentile 70-85 % of the time instead of 95 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Estimate, Exactness
from evalgate.errors import ScoreError, UsageError
from evalgate.stats.clustered import check_confidence, t_quantile
from evalgate.stats.ordered import CHUNK_CELLS, OrderedValues

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

METHOD = "document-bootstrap"
RESAMPLES = 1000


@dataclass(frozen=True)
class DocumentBootstrap:
    """Resamples of documents, the same ones for every figure made from one instance.

    codes [n] int64 in [0, groups): the document of every value, all codes used. seed fixes every draw.
    """

    codes: Integers
    groups: int
    seed: int
    resamples: int = RESAMPLES

    @classmethod
    def of(cls, documents: Integers, *, seed: int, resamples: int = RESAMPLES) -> DocumentBootstrap:
        """Resamples of the documents that occur in `documents` [n] (codes >= 0).

        Raises:
            UsageError: fewer than 2 resamples. ScoreError: no positions.
        """
        if resamples < 2:
            raise UsageError(f"a bootstrap needs at least 2 resamples, not {resamples}")
        if not len(documents):
            raise ScoreError("there are no scored positions to resample: widen the selection")
        present = np.bincount(documents) > 0
        dense = np.cumsum(present) - 1
        return cls(dense[documents].astype(np.int64), int(present.sum()), seed, resamples)

    def counts(self) -> Iterator[Integers]:
        """How often each document is drawn: chunks [r, groups], each row adding up to `groups`."""
        rows = max(1, min(self.resamples, CHUNK_CELLS // self.groups))
        rng = np.random.default_rng(self.seed)
        for start in range(0, self.resamples, rows):
            r = min(rows, self.resamples - start)
            drawn = rng.integers(0, self.groups, size=(r, self.groups))
            drawn += np.arange(r)[:, None] * self.groups
            yield np.bincount(drawn.ravel(), minlength=r * self.groups).reshape(r, self.groups)

    def sums(self, values: Floats) -> Floats:
        """Resampled sums [resamples, c] of values [n, c]."""
        totals = np.stack([np.bincount(self.codes, weights=v, minlength=self.groups) for v in values.T], axis=1)
        return np.concatenate([counts @ totals for counts in self.counts()])

    def percentiles(self, values: Floats, levels: Sequence[float]) -> Floats:
        """Resampled percentiles [resamples, levels] of values [n]; levels in percent, linear interpolation."""
        return self._percentiles(self.order(values), levels)

    def order(self, values: Floats) -> OrderedValues:
        """values [n] sorted, with their documents."""
        return OrderedValues.of(values, self.codes, groups=self.groups)

    def percentile_spans(
        self, values: Floats, levels: Sequence[float], *, confidence: float
    ) -> tuple[list[tuple[float, float]], Floats]:
        """Intervals of the percentiles of values [n], one per level, and their standard errors [levels].

        Needs 2 documents.
        """
        ordered = self.order(values)
        replicates = self._percentiles(ordered, levels)
        tail = _expanded_tail(confidence, self.groups)
        lows, highs = np.quantile(replicates, [tail, 1 - tail], axis=0)
        spans = []
        for q, low, high in zip(levels, lows, highs, strict=True):
            first, last = ordered.limits(q / 100, confidence=confidence)
            spans.append((min(float(low), first), max(float(high), last)))
        return spans, np.asarray(replicates.std(axis=0, ddof=1))

    def _percentiles(self, ordered: OrderedValues, levels: Sequence[float]) -> Floats:
        share = np.asarray(levels, dtype=np.float64) / 100
        return np.concatenate([ordered.percentiles(counts, share) for counts in self.counts()])

    def interval(self, replicates: Floats, *, confidence: float) -> tuple[float, float] | None:
        """Expanded percentile interval of replicates [resamples]; None for fewer than 2 documents."""
        check_confidence(confidence)
        if self.groups < 2:
            return None
        tail = _expanded_tail(confidence, self.groups)
        low, high = np.quantile(replicates, [tail, 1 - tail])
        return float(low), float(high)


def percentile_estimates(
    values: Floats,
    bootstrap: DocumentBootstrap,
    *,
    levels: Sequence[float],
    se: Floats | None = None,
    confidence: float = 0.95,
    exactness: Exactness = "exact",
) -> list[Estimate]:
    """Percentiles of values [n] with intervals, one per level (percent in (0, 100), linear interpolation).

    se [n]: standard errors of estimated values. Their noise pulls percentiles outward, so the interval then runs
    from the low end for values - se to the high end for values + se, which covers a shift of a whole se.

    Raises:
        UsageError: a level is outside (0, 100).
    """
    if any(not 0 < q < 100 for q in levels):
        raise UsageError("percentile levels must lie between 0 and 100")
    check_confidence(confidence)
    points = np.percentile(values, levels)
    if bootstrap.groups < 2:
        spans: list[tuple[float, float] | None] = [None] * len(levels)
        errors: list[float | None] = [None] * len(levels)
    else:
        middle, deviations = bootstrap.percentile_spans(values, levels, confidence=confidence)
        lower = upper = middle
        if se is not None:
            lower, _ = bootstrap.percentile_spans(values - se, levels, confidence=confidence)
            upper, _ = bootstrap.percentile_spans(values + se, levels, confidence=confidence)
        spans = [(min(a, v), max(b, v)) for (a, _), (_, b), v in zip(lower, upper, points, strict=True)]
        errors = [float(s) for s in deviations]
    return [
        _estimate(float(v), span, error, bootstrap=bootstrap, confidence=confidence, exactness=exactness)
        for v, span, error in zip(points, spans, errors, strict=True)
    ]


def correlation_estimate(
    x: Floats, y: Floats, bootstrap: DocumentBootstrap, *, confidence: float = 0.95, exactness: Exactness = "exact"
) -> Estimate | None:
    """Pearson correlation of x and y [n] with a bootstrap interval; None where either is constant (undefined).

    Resamples in which a side happens to be constant are left out.
    """
    x, y = x - x.mean(), y - y.mean()
    scale_x, scale_y = float(np.sqrt(np.square(x).mean())), float(np.sqrt(np.square(y).mean()))
    if scale_x == 0 or scale_y == 0:
        return None
    x, y = x / scale_x, y / scale_y
    value = float(np.clip(np.mean(x * y), -1, 1))
    if bootstrap.groups < 2:
        return _estimate(value, None, None, bootstrap=bootstrap, confidence=confidence, exactness=exactness)
    n, sx, sy, sxx, syy, sxy = bootstrap.sums(np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], axis=1)).T
    spread = (sxx / n - (sx / n) ** 2) * (syy / n - (sy / n) ** 2)
    defined = spread > 1e-18
    replicates = np.clip((sxy / n - sx * sy / n**2)[defined] / np.sqrt(spread[defined]), -1, 1)
    if len(replicates) < 2:
        return _estimate(value, None, None, bootstrap=bootstrap, confidence=confidence, exactness=exactness)
    span = bootstrap.interval(replicates, confidence=confidence)
    error = float(replicates.std(ddof=1))
    return _estimate(value, span, error, bootstrap=bootstrap, confidence=confidence, exactness=exactness)


def _expanded_tail(confidence: float, groups: int) -> float:
    from scipy.special import ndtr

    return float(ndtr(-np.sqrt(groups / (groups - 1)) * t_quantile(confidence, groups - 1.0)))


def _estimate(
    value: float,
    span: tuple[float, float] | None,
    se: float | None,
    *,
    bootstrap: DocumentBootstrap,
    confidence: float,
    exactness: Exactness,
) -> Estimate:
    return Estimate(
        value=value,
        low=None if span is None else float(span[0]),
        high=None if span is None else float(span[1]),
        se=None if span is None else se,
        n=len(bootstrap.codes),
        clusters=bootstrap.groups,
        method=METHOD,
        confidence=confidence,
        exactness=exactness,
    )
