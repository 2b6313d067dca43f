"""Paired differences: the same positions on both sides, so that what they share cancels."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Figure
from evalgate.errors import MismatchError, UsageError
from evalgate.metrics import Scores, Series, get, split_candidates
from evalgate.stats.clustered import clustered_mean
from evalgate.stats.rare import Range

if TYPE_CHECKING:
    import pyarrow as pa

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def paired_difference(
    candidate: Floats,
    reference: Floats,
    *,
    documents: Integers,
    sizes: Floats | None = None,
    windows: Integers | None = None,
    support: tuple[float, float] = (-inf, inf),
    confidence: float = 0.95,
) -> Figure:
    """Mean of candidate minus reference with an interval clustered by document; all [n], same positions.

    windows, support: of the differences, see `clustered_mean`.

    Raises:
        MismatchError: the sides differ in length. ScoreError: see `clustered_mean`.
    """
    if len(candidate) != len(reference):
        raise MismatchError(
            f"one side has {len(candidate)} positions, the other {len(reference)}: score both on the same windows"
        )
    return clustered_mean(
        candidate - reference, documents, sizes=sizes, windows=windows, reach=Range(support), confidence=confidence
    )


def compare_candidates(
    table: pa.Table,
    metric: str,
    *,
    first: str,
    second: str,
    noise_floor: float | None = None,
    confidence: float = 0.95,
) -> Figure:
    """Mean of a metric (its primary series) for candidate `first` minus that for `second`, on the same positions.

    Raises:
        UsageError: no such metric or candidate, or it is not known as a value for both.
        MismatchError: the two candidates were scored on different positions.
    """
    chosen = get(metric)
    sides: dict[str, tuple[Scores, Series]] = {}
    for scores in split_candidates(table, noise_floor=noise_floor):
        if scores.candidate not in (first, second):
            continue
        if chosen.exactness(scores) in (None, "bounded"):
            raise UsageError(f"{metric} has no value for candidate {scores.candidate!r}: compare by another metric")
        sides[scores.candidate] = (scores, chosen.series(scores)[chosen.primary])
    for name in (first, second):
        if name not in sides:
            raise UsageError(f"there is no candidate {name!r} in this run", candidate=name)
    (a, x), (b, y) = sides[first], sides[second]
    same_positions(a, b)
    rows = slice(None) if x.rows is None else x.rows
    low, high = chosen.support
    return paired_difference(
        x.values,
        y.values,
        documents=a.document[rows],
        sizes=x.sizes,
        windows=a.window[rows],
        support=(low - high, high - low),
        confidence=confidence,
    )


def same_positions(a: Scores, b: Scores) -> None:
    """Raise MismatchError unless both sides' rows are the same windows, positions and tokens, in order."""
    if len(a) != len(b):
        raise MismatchError(
            f"{a.candidate!r} has {len(a)} positions and {b.candidate!r} has {len(b)}: score both on the same windows"
        )
    tokens = a.integers("token") != b.integers("token")
    differs = (a.window != b.window) | (a.position != b.position) | tokens
    if differs.any():
        row = int(np.argmax(differs))
        raise MismatchError(f"{a.where(row)} and {b.where(row)} are not the same token: score both on the same windows")
