"""The noise floor beside the figures: rows of figure, floor and excess with its interval."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from evalgate.core import counted
from evalgate.reports._numbers import PERCENT_UNITS, figure_text, plain
from evalgate.reports._words import label

if TYPE_CHECKING:
    from evalgate.summary import Group, Noise

SHOWN = frozenset({"mean", "p99", "p99.9", "rms", "difference", "ratio", "log_ratio"})


class NoiseRow(NamedTuple):
    """A figure's name, its floor, and how much worse than the floor it is."""

    name: str
    floor: str
    excess: str
    interval: str


def noise_rows(group: Group, noise: Noise) -> Iterator[NoiseRow]:
    """The figures of the group that have a floor, in the group's order."""
    for name, metric in group.metrics.items():
        scale, sign = (100.0, "%") if metric.unit in PERCENT_UNITS else (1.0, "")
        for statistic, floor in noise.figures.get(name, {}).items():
            excess = noise.excess.get(name, {}).get(statistic)
            if statistic not in SHOWN or excess is None:
                continue
            text = figure_text(excess.value, excess.interval, unit=metric.unit, documents=group.documents)
            yield NoiseRow(label(metric, statistic), plain(floor.value * scale) + sign, text.value, text.interval)


def conditions(noise: Noise) -> str:
    """What was changed to measure it, in one line."""
    ways = ", ".join(dict.fromkeys(one.rsplit(": ", 1)[-1] for one in noise.conditions))
    sides = ", ".join(dict.fromkeys(one.rsplit(": ", 1)[0] for one in noise.conditions))
    return (
        f"{sides}, each against itself ({ways}) on {counted(noise.windows, 'window')}, "
        f"{counted(noise.positions, 'position')}"
    )
