"""Which candidate is best, and which cannot be told apart: paired by document, Holm over all pairs.

Every two candidates are compared by the paired difference of one metric's mean: what a document does to both cancels.
All pairs are one family, stepped down (Holm 1979): with probability `confidence` no pair is called different that is
not. What is proven of the pairs gives every candidate the places that it can have: one more than how many are proven
better, up to all but those proven worse.

Where only bounds are known, a candidate is better where the bound that speaks against it still beats the bound that
speaks for the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Figure
from evalgate.errors import MismatchError, UsageError
from evalgate.metrics import Metric, Scores, Series, get, mean, split_candidates
from evalgate.stats.clustered import METHOD, DocumentSums, document_sums, figure, mean_ends
from evalgate.stats.estimated import sampling_error, with_sampling
from evalgate.stats.intervals import Sample
from evalgate.stats.paired import same_positions
from evalgate.stats.rare import Range
from evalgate.stats.ratio import check_confidence
from evalgate.stats.units import Units
from evalgate.summary import Place, RankedPair, Ranking, StoredFigure

if TYPE_CHECKING:
    import pyarrow as pa

Integers = NDArray[np.int64]


def ranking(table: pa.Table, metric: str, *, noise_floor: float | None = None, confidence: float = 0.95) -> Ranking:
    """The candidates of a token-score table, best first by the mean of a metric's primary series.

    noise_floor: nats, for metrics that need one.

    Raises:
        UsageError: an unknown metric, one without a better direction, or one that a candidate does not have.
        MismatchError: the candidates were not scored at the same positions. ScoreError: a bad value in the table.
    """
    return ranking_of(list(split_candidates(table, noise_floor=noise_floor)), metric, confidence=confidence)


def ranking_of(candidates: Sequence[Scores], metric: str, *, confidence: float = 0.95) -> Ranking:
    """The same of scores that may come from several tables of the same positions; errors as `ranking`."""
    check_confidence(confidence)
    chosen = get(metric)
    if chosen.better == "zero":
        raise UsageError(f"{metric} has no better direction: rank by another metric, such as kl or top1_agreement")
    sides = [_side(scores, chosen, candidates[0]) for scores in candidates]
    sign = 1.0 if chosen.better == "lower" else -1.0
    order = sorted(sides, key=lambda side: sign * side.value)
    pairs = [_Pair(one, two, chosen) for one, two in combinations(order, 2)]
    decided = _stepped(pairs, confidence)
    ranked = [
        RankedPair(
            first=pair.first.name,
            second=pair.second.name,
            difference=None if found.known is None else StoredFigure.of(found.known),
            better=_winner(found, sign),
        )
        for pair, found in decided
    ]
    places = [place_of(side.name, ranked) for side in order]
    return Ranking(metric=metric, confidence=confidence, places=places, pairs=ranked)


def place_of(name: str, pairs: Sequence[RankedPair]) -> Place:
    """Where a candidate can be, of those that take part in the pairs."""
    own = [(pair.second, pair.better == "second", pair.better == "first") for pair in pairs if pair.first == name]
    own += [(pair.first, pair.better == "first", pair.better == "second") for pair in pairs if pair.second == name]
    behind, ahead = sum(lost for _, lost, _ in own), sum(won for _, _, won in own)
    tied = [other for other, lost, won in own if not lost and not won]
    return Place(candidate=name, best=1 + behind, worst=1 + len(own) - ahead, tied=tied)


@dataclass(frozen=True)
class _Side:
    """One candidate: its mean, and its sums by every kind of unit; `low` and `high` are one where it is known."""

    name: str
    value: float
    exact: bool  # whether its values are known at all, or only between bounds
    low: list[DocumentSums]
    high: list[DocumentSums] | None
    se: float | None  # of the mean, from the values' own errors
    units: Units


@dataclass(frozen=True)
class _Found:
    """What is known of first minus second, at one confidence: the difference, or between bounds its outer ends."""

    known: Figure | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class _Pair:
    """Two candidates, the one with the better value first."""

    first: _Side
    second: _Side
    metric: Metric

    def at(self, confidence: float) -> _Found:
        """First minus second."""
        if self.first.exact and self.second.exact:
            known = self._difference(self.first.low, self.second.low, confidence)
            return _Found(known, known.low, known.high)
        low = high = None
        if self.second.high is not None:
            low = self._difference(self.first.low, self.second.high, confidence).low
        if self.first.high is not None:
            high = self._difference(self.first.high, self.second.low, confidence).high
        return _Found(None, low, high)

    def _difference(self, one: list[DocumentSums], two: list[DocumentSums], confidence: float) -> Figure:
        bottom, top = self.metric.support
        reach = Range((bottom - top, top - bottom))
        units = self.first.units
        sums = [_minus(a, b) for a, b in zip(one, two, strict=True)]
        found = figure(
            float(sums[0].totals.sum()) / float(sums[0].sizes.sum()),
            [mean_ends(s, reach, confidence=confidence) for s in sums if units.codes and np.count_nonzero(s.sizes) > 1],
            units,
            n=sums[0].n,
            method=METHOD,
            confidence=confidence,
            exactness="exact",
        )
        errors = [side.se for side in (self.first, self.second) if side.se is not None]
        # Draws that both share would cancel: this is at least what the values' own errors leave open.
        return with_sampling(found, np.array([np.hypot.reduce(errors)])) if errors else found


def _minus(one: DocumentSums, two: DocumentSums) -> DocumentSums:
    if not np.array_equal(one.sizes, two.sizes):
        raise MismatchError("the candidates divide by different sizes and cannot be paired: rank by another metric")
    return DocumentSums(one.totals - two.totals, one.sizes, one.n)


def _side(scores: Scores, metric: Metric, first: Scores) -> _Side:
    if scores is not first:
        same_positions(first, scores)
    exactness = metric.exactness(scores)
    if exactness is None:
        raise UsageError(f"candidate {scores.candidate!r} has no scores for {metric.name}: rank by another metric")
    series = metric.series(scores)
    known = series.get(metric.primary)
    stem = "" if metric.primary == "value" else f"{metric.primary}_"
    low = known or series[f"{stem}low"]
    high = known or series.get(f"{stem}high")
    rows = slice(None) if low.rows is None else low.rows
    documents, windows = scores.document[rows], scores.window[rows]
    units = Units.of(documents, windows)
    return _Side(
        name=scores.candidate,
        value=Sample(low, documents, exactness=exactness).value(mean()),
        exact=known is not None,
        low=_sums(low, units, documents),
        high=None if high is None else _sums(high, units, documents),
        se=None if known is None or known.se is None else sampling_error(known.se),
        units=units,
    )


def _sums(series: Series, units: Units, documents: Integers) -> list[DocumentSums]:
    """The series added up over every kind of unit; over documents where none gives an interval."""
    return [document_sums(series.values, codes, sizes=series.sizes) for codes in units.codes or (documents,)]


def _stepped(pairs: Sequence[_Pair], confidence: float) -> list[tuple[_Pair, _Found]]:
    """Each pair at the confidence of the step at which it is told apart, or at which nothing more is."""
    decided: dict[int, _Found] = {}
    while len(decided) < len(pairs):
        level = 1 - (1 - confidence) / (len(pairs) - len(decided))
        left = {i: pair.at(level) for i, pair in enumerate(pairs) if i not in decided}
        now = {i: found for i, found in left.items() if _winner(found, 1.0) != "neither"}
        decided |= now or left
    return [(pair, decided[i]) for i, pair in enumerate(pairs)]


def _winner(found: _Found, sign: float) -> Literal["first", "second", "neither"]:
    """Which of a pair is proven better; sign: 1 where a lower mean is better, -1 where a higher one is."""
    below, above = found.high is not None and found.high < 0, found.low is not None and found.low > 0
    if not (below or above):
        return "neither"
    return "first" if below == (sign > 0) else "second"
