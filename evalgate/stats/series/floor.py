"""The noise floor of one comparison: what its models show against themselves, to be drawn beside what they show."""

from __future__ import annotations

from dataclasses import dataclass

from evalgate.core import Figure
from evalgate.summary import Comparison, Summary


@dataclass(frozen=True)
class NoiseFloor:
    """How large a metric is between a model and itself, under other conditions of computing.

    measured: statistic -> figure, where the run measured its floor (`--noise-floor`). load_check: the larger KL (nats)
    that the two sides showed when they were loaded; None where neither was checked, or of another metric than KL.
    """

    candidate: str
    metric: str
    measured: dict[str, Figure]
    load_check: float | None

    @property
    def mean(self) -> float | None:
        """The floor of the mean: as the run measured it, else as the load checks saw it; None where unknown."""
        if "mean" in self.measured:
            return self.measured["mean"].value
        return self.load_check

    @property
    def source(self) -> str:
        """Where `mean` comes from, in a few words; "" where there is none."""
        if "mean" in self.measured:
            return "measured in this run"
        return "" if self.load_check is None else "seen when the models were loaded"


def noise_floor(summary: Summary, comparison: Comparison, metric: str = "kl") -> NoiseFloor:
    """The noise floor of a metric in one comparison of a run."""
    measured = {} if comparison.noise is None else comparison.noise.figures.get(metric, {})
    sides = (summary.reference, comparison.candidate) if summary.reference else ()
    checks = [side.kl_floor for side in sides if side.kl_floor is not None] if metric == "kl" else []
    return NoiseFloor(
        candidate=comparison.candidate.name,
        metric=metric,
        measured={name: stored.figure for name, stored in measured.items()},
        load_check=max(checks, default=None),
    )
