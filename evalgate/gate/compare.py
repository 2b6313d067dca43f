"""Two runs on the same positions: did the new candidate beat the old one?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from evalgate.core import Figure, Limits
from evalgate.errors import MismatchError, UsageError, choose
from evalgate.gate.figures import Evidence, rule_figure
from evalgate.gate.policy import Rule
from evalgate.metrics import Scores, get, split_candidates
from evalgate.stats.mcnemar import McNemar, mcnemar
from evalgate.stats.paired import same_positions

if TYPE_CHECKING:
    from evalgate.store.runs import Run

METRICS = ("kl", "reverse_kl", "js", "tv", "top1_agreement", "flip", "regret", "topk_overlap", "nll", "bits_per_byte")
Winner = Literal["first", "second", "neither"]


@dataclass(frozen=True)
class PairedMetric:
    """One metric's mean on both sides; difference: first minus second, paired, with its interval.

    winner: the side that is better with the whole interval on its side of 0; "neither" where 0 is inside, or where
    the metric has no better direction.
    """

    metric: str
    unit: str
    first: float
    second: float
    difference: Figure
    winner: Winner


@dataclass(frozen=True)
class PairedRuns:
    """Two candidates on the same positions. agreement: McNemar's test on "picks the reference's token"."""

    first: str
    second: str
    confidence: float
    documents: int
    positions: int
    figures: tuple[PairedMetric, ...]
    agreement: McNemar | None

    def document(self) -> dict[str, Any]:
        """The comparison as `compare --json` prints it."""
        figures = [
            {
                "metric": f.metric,
                "unit": f.unit,
                "first": f.first,
                "second": f.second,
                "difference": f.difference.value,
                "low": f.difference.low,
                "high": f.difference.high,
                "winner": f.winner,
            }
            for f in self.figures
        ]
        agreement = self.agreement
        tested = None if agreement is None else {**asdict(agreement), "difference": agreement.difference.document()}
        return {**asdict(self), "figures": figures, "agreement": tested}


def sides(run: Run, name: str | None) -> list[Scores]:
    """The scores of a run's candidates, or of the one that is named.

    Raises:
        UsageError: there is no such candidate.
    """
    floor = run.summary.reference.noise_floor if run.summary.reference else None
    found = {scores.candidate: scores for scores in split_candidates(run.table, noise_floor=floor)}
    if name is None:
        return list(found.values())
    if name not in found:
        where = "the run" if run.place is None else f"the run {run.place}"
        raise UsageError(f"{where} has no candidate {name!r}: {choose(name, found)}")
    return [found[name]]


def paired_sides(
    first: Run, second: Run, candidates: tuple[str | None, str | None] = (None, None)
) -> list[tuple[Scores, Scores]]:
    """Who is compared with whom: those of one name, or the only candidate of a side with each of the other's.

    candidates: names, None = all.

    Raises:
        UsageError: there is no such candidate, or several on both sides and none has a namesake.
    """
    one, two = sides(first, candidates[0]), sides(second, candidates[1])
    if len(one) == 1 or len(two) == 1:
        return [(a, b) for a in one for b in two]
    named = {scores.candidate: scores for scores in two}
    pairs = [(scores, named[scores.candidate]) for scores in one if scores.candidate in named]
    if not pairs:
        raise UsageError(
            f"no candidate of {first.place or 'the first run'} has a namesake in {second.place or 'the second'}: "
            "name one of each with --candidate-a and --candidate-b"
        )
    return pairs


def paired_runs(
    first: Run,
    second: Run,
    *,
    candidates: tuple[str | None, str | None] = (None, None),
    metrics: Sequence[str] = METRICS,
    confidence: float = 0.95,
) -> list[PairedRuns]:
    """For each pair of `paired_sides`: every metric that both have, paired by position, and McNemar's test of top-1.

    Raises:
        MismatchError: other positions, or another reference. UsageError: an unknown metric or candidate.
    """
    _same_reference(first, second)
    pairs = paired_sides(first, second, candidates)
    return [_paired(one, two, first.summary.seed, metrics=metrics, confidence=confidence) for one, two in pairs]


def _paired(one: Scores, two: Scores, seed: int, *, metrics: Sequence[str], confidence: float) -> PairedRuns:
    same_positions(one, two)
    evidence = Evidence(scores=one, baseline=two, unit="batches")
    swapped = Evidence(scores=two, unit="batches")
    figures = [
        _figure(name, evidence, swapped, confidence=confidence)
        for name in metrics
        if get(name).exactness(one) in ("exact", "estimated") and get(name).exactness(two) in ("exact", "estimated")
    ]
    return PairedRuns(
        first=one.candidate,
        second=two.candidate,
        confidence=confidence,
        documents=len(np.unique(one.document)),
        positions=len(one),
        figures=tuple(figures),
        agreement=_agreement(one, two, seed=seed, confidence=confidence),
    )


def _same_reference(first: Run, second: Run) -> None:
    a, b = first.summary.reference, second.summary.reference
    if (a is None) != (b is None) or (
        a and b and a.weights_hash and b.weights_hash and a.weights_hash != b.weights_hash
    ):
        named = [side.spec if side else "none" for side in (a, b)]
        raise MismatchError(f"the runs have different references ({' and '.join(named)}): measure both against one")


def _figure(name: str, evidence: Evidence, swapped: Evidence, *, confidence: float) -> PairedMetric:
    metric = get(name)
    statistic = next(s.name for s in metric.statistics if s.kind == "mean" and s.series == metric.primary)
    own = Rule(metric=name, statistic=statistic, max=0.0)
    paired = Rule(metric=name, statistic=statistic, max=0.0, against="baseline")
    one, two, difference = (
        rule_figure(rule, about).measure.figure(Limits(), confidence=confidence)
        for rule, about in ((own, evidence), (own, swapped), (paired, evidence))
    )
    if one.value is None or two.value is None or difference.value is None:
        raise UsageError(f"{name} is only bounded here: compare by another metric")
    return PairedMetric(
        metric=name,
        unit=metric.unit,
        first=one.value,
        second=two.value,
        difference=difference,
        winner=_winner(metric.better, difference.low, difference.high),
    )


def _winner(better: str, low: float | None, high: float | None) -> Winner:
    negative, positive = high is not None and high < 0, low is not None and low > 0
    if better == "zero" or not (negative or positive):
        return "neither"
    return "first" if negative == (better == "lower") else "second"


def _agreement(one: Scores, two: Scores, *, seed: int, confidence: float) -> McNemar | None:
    if get("top1_agreement").exactness(one) != "exact" or get("top1_agreement").exactness(two) != "exact":
        return None
    agrees = [scores.integers("ref_top1") == scores.integers("cand_top1") for scores in (one, two)]
    return mcnemar(agrees[0], agrees[1], documents=one.document, seed=seed, confidence=confidence)
