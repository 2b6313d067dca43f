"""A metric's mean in every part of a cut, with the range of each part on the axis that it is cut by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from evalgate.core import Exactness, Figure
from evalgate.metrics import Scores, mean
from evalgate.stats.intervals import Sample
from evalgate.stats.series.known import known_series
from evalgate.stats.slices import ENTROPY_EDGES, By, slice_metric
from evalgate.stats.units import FEWEST_WINDOWS


@dataclass(frozen=True)
class Part:
    """One part. low, high: what it spans on the axis, [low, high) in nats for entropy and low to high, both included,
    for positions; None where the axis has no numbers, and high is None where the part has no end.

    share: of the sum of the metric's values, None where that is 0. The figure's `n` counts positions.
    """

    name: str
    low: float | None
    high: float | None
    documents: int
    share: float | None
    figure: Figure


@dataclass(frozen=True)
class Profile:
    """All parts of one cut that hold a position, in the cut's own order; their intervals hold together.

    confidence: that all intervals hold at once. overall: the mean over all positions, at that confidence alone.
    """

    candidate: str
    metric: str
    unit: str
    by: By
    series: str
    exactness: Exactness
    confidence: float
    parts: tuple[Part, ...]
    overall: Figure


def profile(
    scores: Scores,
    by: By,
    metric: str = "kl",
    *,
    series: str | None = None,
    token_texts: Mapping[int, str] | None = None,
    confidence: float = 0.95,
) -> Profile:
    """The mean of a metric by `by`: position (bins that double), entropy (of the reference), domain, token, document.

    series: None = the primary one, or the lower bounds where only bounds are known (`known_series`). token_texts:
    decoded text by token id, for by="token".

    Raises:
        UsageError: an unknown cut, a metric or series that the candidate does not have, or missing token texts.
        ScoreError: a bad value in a column that is needed.
    """
    known = known_series(scores, metric, series)
    cut = slice_metric(scores, metric, by=by, series=known.name, token_texts=token_texts, confidence=confidence)
    parts = []
    for one in cut.slices:
        low, high = _span(by, one.name)
        parts.append(Part(one.name, low, high, one.documents, one.share, one.figure))
    return Profile(
        candidate=scores.candidate,
        metric=metric,
        unit=known.metric.unit,
        by=by,
        series=known.name,
        exactness=known.exactness,
        confidence=confidence,
        parts=tuple(parts),
        overall=known.sample().figure(mean(), confidence=confidence),
    )


def worst_documents(
    scores: Scores, metric: str = "kl", *, series: str | None = None, most: int = 300, confidence: float = 0.95
) -> Profile:
    """The documents where a metric is worst, the worst first, at most so many.

    As `profile` by document, of which it gives some parts, in a time that does not grow with the number of documents. A
    metric that is neither better high nor low is worst where it is largest in size.
    Intervals, of documents that have windows enough for one, hold together over all documents.

    Raises:
        UsageError: a metric or series that the candidate does not have.
        ScoreError: a bad value in a column that is needed.
    """
    known = known_series(scores, metric, series)
    one, whole = known.series, known.sample()
    assert whole.windows is not None
    sizes = np.ones(len(one.values)) if one.sizes is None else one.sizes
    count = len(scores.documents)
    totals, weights = (np.bincount(whole.documents, weights=x, minlength=count) for x in (one.values, sizes))
    present = np.flatnonzero(weights > 0)
    means = totals[present] / weights[present]
    badness = {"lower": means, "higher": -means, "zero": np.abs(means)}[known.metric.better]
    worst = present[np.argsort(-badness, kind="stable")[:most]]
    pairs = np.unique(np.stack([whole.documents, whole.windows]), axis=1)[0]
    families = int(np.count_nonzero(np.bincount(pairs) >= FEWEST_WINDOWS)) if count > 1 else 1
    level = 1 - (1 - confidence) / max(1, families)
    order = np.argsort(whole.documents, kind="stable")
    starts = np.searchsorted(whole.documents[order], [worst, worst + 1])
    total, parts = float(one.values.sum()), []
    for code, first, last in zip(worst.tolist(), *starts.tolist(), strict=True):
        rows = order[first:last]
        sample = Sample(
            one.at(rows),
            whole.documents[rows],
            windows=whole.windows[rows],
            support=whole.support,
            exactness=known.exactness,
        )
        share = float(one.values[rows].sum()) / total if total else None
        figure = sample.figure(mean(), confidence=level)
        parts.append(Part(scores.documents[code], None, None, figure.documents, share, figure))
    return Profile(
        candidate=scores.candidate,
        metric=metric,
        unit=known.metric.unit,
        by="document",
        series=known.name,
        exactness=known.exactness,
        confidence=confidence,
        parts=tuple(parts),
        overall=whole.figure(mean(), confidence=confidence),
    )


def cuts_of(scores: Scores, token_texts: Mapping[int, str] | None = None) -> tuple[By, ...]:
    """What this candidate's positions can be cut by: token needs every token's text, entropy a column of entropies."""
    found: list[By] = ["domain", "position"]
    if scores.complete("ref_entropy" if scores.has("ref_entropy") else "cand_entropy"):
        found.append("entropy")
    if token_texts is not None and all(token in token_texts for token in set(scores.integers("token").tolist())):
        found.append("token")
    return (*found, "document")


def _span(by: By, name: str) -> tuple[float | None, float | None]:
    """What a part of `slice_metric` spans, from its name."""
    if by == "position":
        low, _, high = name.partition("-")
        return float(low), float(high or low)
    if by == "entropy":
        if name.startswith("over"):
            return ENTROPY_EDGES[-1], None
        low, _, high = name.removesuffix(" nats").partition("-")
        return float(low), float(high)
    return None, None
