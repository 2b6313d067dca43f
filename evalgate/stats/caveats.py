"""What a reader must know beside the intervals: few documents, one text only, a text that drifts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from evalgate.metrics import Kind, Scores, get, split_candidates
from evalgate.stats.summarize import HEADLINE, select
from evalgate.stats.units import FEWEST_WINDOWS, WITHIN_TEXT, drifts

if TYPE_CHECKING:
    import pyarrow as pa

ENOUGH = 24  # documents from which intervals are tested to hold their confidence (benchmarks/coverage.py)


def caveats(table: pa.Table, *, kind: Kind, noise_floor: float | None) -> list[str]:
    """Notes on the intervals of a token-score table; empty where there is nothing to say."""
    found = []
    for number, scores in enumerate(split_candidates(table, noise_floor=noise_floor)):
        count = len(scores.documents)
        if number == 0 and 2 <= count < ENOUGH:
            found.append(
                f"{count} documents say little about rare, bad ones: intervals are wide and may still be too narrow; "
                f"their coverage is tested from {ENOUGH} documents on"
            )
        if count == 1:
            found += _within(scores, kind, first=number == 0)
        found += _below(scores, kind)
    return found


def _below(scores: Scores, kind: Kind) -> list[str]:
    """Which groups' estimated means are replaced by their certain lower bounds."""
    metric = get(HEADLINE[kind])
    if metric.exactness(scores) != "estimated":
        return []
    values = metric.series(scores)["value"]
    groups = {"": values}
    if len(scores.domains) > 1:
        groups |= {f" in {name}": select(values, scores.domain == code) for code, name in enumerate(scores.domains)}
    return [
        f"the estimated mean {metric.name} of {scores.candidate}{where} lies {one.below:.2g} below its certain lower "
        "bound, which is shown in its place: draws miss what this candidate likes, and the truth may be well above it"
        for where, one in groups.items()
        if one.below
    ]


def _within(scores: Scores, kind: Kind, *, first: bool) -> list[str]:
    values = next(iter(get(HEADLINE[kind]).series(scores).values())).values
    windows = scores.window if len(values) == len(scores) else scores.window[: len(values)]
    found = []
    if first and len(np.unique(windows)) >= FEWEST_WINDOWS:
        found.append(
            f"one text: intervals are over stretches of its windows and hold {WITHIN_TEXT} alone; "
            "to speak of other text, measure several documents"
        )
    if drifts(values, windows):
        found.append(
            f"the {get(HEADLINE[kind]).name} of {scores.candidate} rises or falls along the text: its interval "
            f"{WITHIN_TEXT} is too narrow"
        )
    return found
