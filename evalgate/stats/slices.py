"""One metric cut by domain, position, reference entropy, token class or document, with simultaneous intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Exactness, Figure
from evalgate.errors import ScoreError, UsageError, choose
from evalgate.metrics import Metric, Scores, Series, get, mean
from evalgate.stats.intervals import Sample
from evalgate.stats.ratio import check_confidence
from evalgate.stats.tokenclass import CLASSES, token_class
from evalgate.stats.units import Units, Windows

Integers = NDArray[np.int64]
By = Literal["domain", "position", "entropy", "token", "document"]

_NAMED_PARTS = 12  # how many parts an error spells out
ENTROPY_EDGES = (0.0, 0.1, 0.5, 1.0, 2.0, 4.0)  # nats; bins [edge, next edge), the last one open


@dataclass(frozen=True)
class Slice:
    """One part of the positions. share: of the sum of the metric's values over all parts, None where that is 0.

    The figure's confidence is that of its interval alone; the intervals of a `SliceTable` hold together.
    """

    name: str
    documents: int
    share: float | None
    figure: Figure


@dataclass(frozen=True)
class SliceTable:
    """All parts of one cut, in the cut's own order; `confidence` is that all their intervals hold at once.

    overall: the metric's mean over all positions.
    """

    candidate: str
    metric: str
    unit: str
    by: By
    confidence: float
    slices: tuple[Slice, ...]
    overall: float

    def document(self) -> dict[str, Any]:
        """The table as `slices --json` prints it."""
        slices = [
            {"name": s.name, "documents": s.documents, "share": s.share, "estimate": s.figure.document()}
            for s in self.slices
        ]
        return {**asdict(self), "slices": slices}


@dataclass(frozen=True)
class _Labels:
    """codes [n] into names; names without a position are left out of the table."""

    codes: Integers
    names: tuple[str, ...]


def slice_metric(
    scores: Scores,
    metric: str,
    *,
    by: By,
    series: str | None = None,
    token_texts: Mapping[int, str] | None = None,
    confidence: float = 0.95,
) -> SliceTable:
    """Mean of a metric in every part of a cut, with intervals that hold together (Bonferroni).

    series: which of the metric's series, None = its primary one; a bounded metric has `low` and `high`.
    token_texts: decoded text by token id, for by="token". A part with one document has an interval only within that
    text, where it has windows enough (`stats.units`).

    Raises:
        UsageError: an unknown cut, a metric that is not known as asked, or missing token texts.
        ScoreError: a bad value in a column that is needed.
    """
    check_confidence(confidence)
    chosen = get(metric)
    one = _series(scores, chosen, series)
    if by not in get_args(By):
        raise UsageError(f"cannot cut by {by!r}: {choose(by, get_args(By))}", by=by)
    if one.rows is not None and by in ("position", "entropy", "token"):
        raise UsageError(f"{metric} has one value per window and cannot be cut by {by}: cut by domain or document")
    labels = _LABELS[by](scores, token_texts)
    rows = np.arange(len(scores)) if one.rows is None else one.rows
    return SliceTable(
        candidate=scores.candidate,
        metric=metric,
        unit=chosen.unit,
        by=by,
        confidence=confidence,
        slices=_slices(
            one,
            labels,
            chosen,
            codes=labels.codes[rows],
            documents=scores.document[rows],
            windows=scores.window[rows],
            exactness=chosen.exactness(scores) or "exact",
            family=confidence,
        ),
        overall=float(one.values.sum() / (len(one.values) if one.sizes is None else one.sizes.sum())),
    )


def part_rows(scores: Scores, *, by: By, name: str, token_texts: Mapping[int, str] | None = None) -> NDArray[np.bool_]:
    """Which rows [n] of the scores are in the part `name` of a cut.

    Raises:
        UsageError: the cut has no such part, or missing token texts.
    """
    labels = _LABELS[by](scores, token_texts)
    rows = labels.codes == (labels.names.index(name) if name in labels.names else -1)
    if not rows.any():
        present = [labels.names[code] for code in np.unique(labels.codes)]
        found = choose(name, present, most=_NAMED_PARTS)
        raise UsageError(f"there is no position in {by} {name!r}: {found}", by=by, part=name)
    return np.asarray(rows, dtype=np.bool_)


def _series(scores: Scores, metric: Metric, name: str | None) -> Series:
    if metric.exactness(scores) is None:
        raise UsageError(f"candidate {scores.candidate!r} has no scores for {metric.name}: choose another metric")
    found = metric.series(scores)
    wanted = name or metric.primary
    if wanted not in found:
        raise UsageError(f"{metric.name} has no series {wanted!r} here: {choose(wanted, found)}")
    return found[wanted]


def _slices(
    one: Series,
    labels: _Labels,
    metric: Metric,
    *,
    codes: Integers,
    documents: Integers,
    windows: Windows,
    exactness: Exactness,
    family: float,
) -> tuple[Slice, ...]:
    order = np.argsort(codes, kind="stable")
    present, starts = np.unique(codes[order], return_index=True)
    parts = np.split(order, starts[1:])
    units = [Units.of(documents[part], windows[part]) for part in parts]
    # Every part that gets an interval takes its share of the error rate.
    confidence = 1 - (1 - family) / max(1, sum(bool(found.codes) for found in units))
    total = float(one.values.sum())
    found = []
    for code, part, unit in zip(present, parts, units, strict=True):
        values = one.at(part)
        sample = Sample(
            values,
            documents[part],
            windows=windows[part],
            support=metric.support_of(metric.primary),
            exactness=exactness,
        )
        found.append(
            Slice(
                name=labels.names[code],
                documents=unit.documents,
                share=float(values.values.sum()) / total if total else None,
                figure=sample.figure(mean(), confidence=confidence),
            )
        )
    return tuple(found)


def _by_domain(scores: Scores, _: Mapping[int, str] | None) -> _Labels:
    return _Labels(scores.domain.astype(np.int64), scores.domains)


def _by_document(scores: Scores, _: Mapping[int, str] | None) -> _Labels:
    return _Labels(scores.document, scores.documents)


def _by_position(scores: Scores, _: Mapping[int, str] | None) -> _Labels:
    # Bins [2^b, 2^(b+1)) of the index in the window, which starts at 1.
    codes = np.frexp(scores.position)[1].astype(np.int64) - 1
    names = tuple("1" if b == 0 else f"{2**b}-{2 ** (b + 1) - 1}" for b in range(int(codes.max()) + 1))
    return _Labels(codes, names)


def _by_entropy(scores: Scores, _: Mapping[int, str] | None) -> _Labels:
    edges = ENTROPY_EDGES
    entropy = scores.floats("ref_entropy" if scores.has("ref_entropy") else "cand_entropy")
    names = [f"{a:g}-{b:g} nats" for a, b in pairwise(edges)] + [f"over {edges[-1]:g} nats"]
    # Rounding may leave an entropy a hair below 0.
    codes = np.maximum(np.searchsorted(edges, entropy, side="right") - 1, 0)
    return _Labels(codes.astype(np.int64), tuple(names))


def _by_token(scores: Scores, texts: Mapping[int, str] | None) -> _Labels:
    if texts is None:
        raise UsageError("cutting by token class needs the tokens' texts: pass token_texts from the tokenizer")
    ids, inverse = np.unique(scores.integers("token"), return_inverse=True)
    missing = [int(i) for i in ids if int(i) not in texts]
    if missing:
        raise ScoreError(f"token id {missing[0]} has no text ({len(missing)} such ids): pass the whole vocabulary")
    classes = np.array([CLASSES.index(token_class(texts[int(i)])) for i in ids], dtype=np.int64)
    return _Labels(classes[inverse], CLASSES)


_LABELS: Mapping[By, Callable[[Scores, Mapping[int, str] | None], _Labels]] = {
    "domain": _by_domain,
    "position": _by_position,
    "entropy": _by_entropy,
    "token": _by_token,
    "document": _by_document,
}
