"""Rules that share one error rate.

With correction = "holm" the verdicts of all rules on all candidates hold together: with probability `confidence` none
of them is wrong. Passes and fails are two families with half the error rate each (a two-sided interval splits it
anyhow), and each is stepped down (Holm 1979): all rules are held against intervals at 1 - (1 - confidence) / n; those
decided leave, and the n that are left are tried again at their own, lower confidence. Baselines and noise floors are
inside that level: a difference from a baseline has one interval, and a floor shares the error rate with the figure.
A family has the rules whose kind claims such a verdict (`RuleKind.proves`): all rules claim their fails, and one
against regression does not claim its pass. A rule that is not applicable is in neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from evalgate.core import Figure, Verdict
from evalgate.gate.figures import RuleFigure

_CLAIMS: tuple[Verdict, ...] = ("pass", "fail")


@dataclass(frozen=True)
class Decision:
    """A rule's verdict and the figure whose interval gave it."""

    verdict: Verdict
    figure: Figure


def decide(figures: Sequence[RuleFigure], *, confidence: float, correction: Literal["none", "holm"]) -> list[Decision]:
    """One decision per figure, corrected for their number where asked."""
    if correction == "none":
        return [_decision(figure, confidence) for figure in figures]
    claiming = {v: [i for i, f in enumerate(figures) if v in f.kind.proves] for v in _CLAIMS}
    proven = {v: _stepped(figures, claiming[v], v, confidence) for v in _CLAIMS}
    left = max(1, *(len(claiming[v]) - len(proven[v]) for v in _CLAIMS))

    def unproven(figure: RuleFigure) -> Decision:
        found = _decision(figure, 1 - (1 - confidence) / left)
        # What only a later step could prove is undecided; a verdict that claims nothing stands.
        return Decision("undecided", found.figure) if found.verdict in figure.kind.proves else found

    return [proven["fail"].get(i) or proven["pass"].get(i) or unproven(figure) for i, figure in enumerate(figures)]


def _decision(figure: RuleFigure, confidence: float) -> Decision:
    found = figure.measure.figure(figure.limits, confidence=confidence)
    return Decision(figure.kind.verdict(figure.measure, figure.limits, found), found)


def _stepped(
    figures: Sequence[RuleFigure], family: Sequence[int], wanted: Verdict, confidence: float
) -> dict[int, Decision]:
    """The figures of a family (indices) that Holm's procedure decides in one direction."""
    decided: dict[int, Decision] = {}
    while len(decided) < len(family):
        level = 1 - (1 - confidence) / (len(family) - len(decided))
        left = {i: _decision(figures[i], level) for i in family if i not in decided}
        now = {i: decision for i, decision in left.items() if decision.verdict == wanted}
        if not now:
            break
        decided |= now
    return decided
