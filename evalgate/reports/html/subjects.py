"""What a report is about: each candidate's figures beside its scores, under the name that is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from evalgate.core import Exactness
from evalgate.metrics import Scores, get, split_candidates
from evalgate.stats.series import NoiseFloor, ends_of, noise_floor

if TYPE_CHECKING:
    from evalgate.store.runs import Run
    from evalgate.summary import Comparison

LEADING = {"kl": "kl", "agree": "top1_agreement", "ppl": "nll"}  # what a kind of run is cut and summed by


@dataclass(frozen=True)
class Subject:
    """One candidate. place: its place in the run, which is its colour. metric: what its plots are of."""

    place: int
    name: str
    comparison: Comparison
    scores: Scores
    metric: str

    @property
    def exactness(self) -> Exactness:
        """Of the metric."""
        return get(self.metric).exactness(self.scores) or "exact"

    @property
    def ends(self) -> tuple[str, ...]:
        """`value` (or the metric's primary series), or the bounds that are known."""
        return ends_of(self.scores, self.metric)


@dataclass(frozen=True)
class Floor:
    """The noise floor that plots draw: the largest of the candidates', None where none is known."""

    value: float | None
    source: str

    @property
    def label(self) -> str:
        """What stands at its line."""
        from evalgate.reports._svg import number

        return "noise floor" if self.value is None else f"noise floor {number(self.value)}"


def subjects(run: Run) -> list[Subject]:
    """The candidates in the order of the run's summary.

    Raises:
        ScoreError: the table does not hold the candidates of the summary, or a value that none can have.
    """
    summary = run.summary
    floor = summary.reference.noise_floor if summary.reference else None
    scores = {one.candidate: one for one in split_candidates(run.table, noise_floor=floor)}
    return [
        Subject(place, comparison.candidate.spec, comparison, scores[comparison.candidate.name], LEADING[summary.kind])
        for place, comparison in enumerate(summary.comparisons)
        if comparison.candidate.name in scores
    ]


def kl_floor(run: Run) -> Floor:
    """The noise floor of the run's mean KL."""
    found: list[NoiseFloor] = [noise_floor(run.summary, one) for one in run.summary.comparisons]
    known = [(one.mean, one.source) for one in found if one.mean is not None]
    value, source = max(known, default=(None, ""), key=lambda item: item[0] or 0.0)
    return Floor(value, source)
