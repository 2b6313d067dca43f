"""Metrics: pure functions of the token-score table, one file each; the file name is the CLI name.

A metric file defines `METRIC`, and nothing else has to change: `registry()` finds it. It turns one
candidate's `Scores` into named series (one value per position, or per window) and lists the statistics
that are reported of them; `evalgate.stats` computes those with their intervals. Values are float64.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Exactness
from evalgate.errors import ScoreError, UsageError, choose
from evalgate.metrics._columns import check_columns
from evalgate.metrics._scores import Floats, Integers, Scores, split_candidates
from evalgate.table import Range

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "KL_STATISTICS",
    "Kind",
    "Metric",
    "Scores",
    "Series",
    "Statistic",
    "check_table",
    "column_series",
    "get",
    "mean",
    "percentiles",
    "registry",
    "split_candidates",
]

Kind = Literal["kl", "agree", "ppl"]


@dataclass(frozen=True)
class Series:
    """Numbers to be averaged or ranked; the figure of a mean is sum(values) / sum(sizes).

    values [m] float64. sizes [m]: denominators, None = 1 each. rows [m]: the row of `Scores` that each value
    belongs to (its document and domain), None = row i for value i. se [m]: standard error of an estimated value.
    low [m]: what the true value behind an estimated one is certainly not below. A single value may lie below it, since
    cutting it off would bias the mean; the mean may not (`stats.estimated`).
    """

    values: Floats
    sizes: Floats | None = None
    rows: Integers | None = None
    se: Floats | None = None
    low: Floats | None = None

    def at(self, chosen: NDArray[np.bool_] | NDArray[np.int32] | Integers) -> Series:
        """The values that `chosen` (flags or indices) selects."""
        return Series(
            values=self.values[chosen],
            sizes=None if self.sizes is None else self.sizes[chosen],
            rows=None if self.rows is None else self.rows[chosen],
            se=None if self.se is None else self.se[chosen],
            low=None if self.low is None else self.low[chosen],
        )

    @property
    def below(self) -> float:
        """How far the mean lies below its certain lower bound; 0 where it does not."""
        if self.low is None:
            return 0.0
        total = len(self.values) if self.sizes is None else float(self.sizes.sum())
        gap = float(self.low.sum() - self.values.sum()) / total
        return gap if gap > 1e-6 * abs(float(self.low.sum())) / total else 0.0  # both are stored as float32


@dataclass(frozen=True)
class Statistic:
    """One figure to report of a series.

    level: percent in (0, 100), for percentiles. scale: applied to the mean and to its interval.
    other: the second series of a correlation (Pearson). sampling: the standard error of the mean that the values' own
    errors make, sqrt(sum se^2) / n; left out where they have none.
    """

    name: str
    kind: Literal["mean", "percentile", "min", "max", "correlation", "sampling"] = "mean"
    series: str = "value"
    level: float = 50.0
    scale: Literal["identity", "exp", "sqrt"] = "identity"
    other: str = ""


@dataclass(frozen=True)
class Metric:
    """What a metric is: see the field comments."""

    name: str  # file name and CLI name
    unit: str  # nats, fraction, tokens, bits per byte, ...
    better: Literal["lower", "higher", "zero"]  # the direction in which a candidate is closer to its reference
    kinds: tuple[Kind, ...]  # the runs that report it
    columns: tuple[str, ...]  # it is left out where one of these is absent
    pair: bool  # needs reference and candidate
    series: Callable[[Scores], Mapping[str, Series]]
    statistics: tuple[Statistic, ...]  # those whose series is absent (no reference) are left out
    per: Literal["position", "window"] = "position"
    primary: str = "value"  # the series that slices, paired comparisons and gates read
    support: tuple[float, float] = (-np.inf, np.inf)  # of means before exp; intervals are cut to it
    least: Mapping[str, float] = field(default_factory=dict)  # of means of single series, where others are signed
    needs_floor: bool = False  # needs a noise floor
    known_only: bool = False  # left out where some value is known as an interval alone
    instead: str = ""  # a column that stands in where `columns` are absent
    # What the columns that it owns may hold, without ref_ and cand_, _low and _high: a table beyond it is refused.
    ranges: Mapping[str, Range] = field(default_factory=dict)
    # What is left of it where a side is an endpoint, which lists its likeliest tokens: a value, an interval, a lower
    # bound without an upper one, or nothing.
    listed: Literal["value", "interval", "lower", "none"] = "value"

    def support_of(self, series: str) -> tuple[float, float]:
        """The range of a series' mean."""
        return self.least.get(series, self.support[0]), self.support[1]

    def exactness(self, scores: Scores) -> Exactness | None:
        """How the metric is known for this candidate; None where it cannot be computed at all."""
        if self.needs_floor and scores.noise_floor is None:
            return None
        forms = [scores.form(name) for name in self.columns]
        if None in forms and self.instead:
            forms = [scores.form(self.instead)]
        if None in forms or (self.known_only and "bounded" in forms):
            return None
        return "bounded" if "bounded" in forms else "estimated" if "estimated" in forms else "exact"


def column_series(name: str) -> Callable[[Scores], Mapping[str, Series]]:
    """Series of a pair column: `value` (with a certain lower bound `low` beside an estimate that has one), or `low` and
    `high` where only an interval is known.

    `high` is left out when a position is unbounded above (null), for its mean is then unbounded too.
    """

    def series(scores: Scores) -> Mapping[str, Series]:
        form = scores.form(name)
        if form == "exact":
            return {"value": Series(scores.floats(name))}
        if form == "estimated":
            values, se = scores.floats(name), scores.floats(f"{name}_se")
            if not scores.complete(f"{name}_low"):
                return {"value": Series(values, se=se)}
            low = scores.floats(f"{name}_low")
            return {"value": Series(values, se=se, low=low), "low": Series(low)}
        lower = scores.floats(f"{name}_low")
        if not scores.complete(f"{name}_high"):
            return {"low": Series(lower)}
        high = scores.floats(f"{name}_high")
        crossed = lower > high
        if crossed.any():
            row = int(np.argmax(crossed))
            raise ScoreError(f"{name}_low is above {name}_high at {scores.where(row)}: score that window again")
        return {"low": Series(lower), "high": Series(high)}

    return series


def mean(name: str = "mean", *, series: str = "value") -> Statistic:
    """The mean of a series under the given name."""
    return Statistic(name, series=series)


def percentiles(*levels: float, series: str = "value") -> tuple[Statistic, ...]:
    """Percentiles (percent, linear interpolation), named p1, p99.9, ...; 50 is `median`."""
    return tuple(Statistic("median" if q == 50 else f"p{q:g}", "percentile", series, level=q) for q in levels)


# The block that llama-perplexity prints for KL, in its order.
KL_STATISTICS = (
    mean(),
    Statistic("max", "max"),
    *percentiles(99.9, 99, 95, 90, 50, 10, 5, 1, 0.1),
    Statistic("min", "min"),
)


@cache
def registry() -> Mapping[str, Metric]:
    """Every metric by name, found by itself among the files of this package."""
    found: dict[str, Metric] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name.startswith("_"):
            continue
        metric = importlib.import_module(f"{__name__}.{module.name}").METRIC
        if metric.name != module.name:
            raise UsageError(f"metric file {module.name}.py defines {metric.name!r}: give both the same name")
        found[module.name] = metric
    return found


def check_table(table: pa.Table) -> None:
    """Check that every column of a token-score table holds what it can: call it where a table is read.

    Raises:
        ScoreError: names the column and the row; its message ends a sentence about the table.
    """
    check_columns(table, {name: allowed for metric in registry().values() for name, allowed in metric.ranges.items()})


def get(name: str) -> Metric:
    """The metric of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in registry():
        raise UsageError(f"there is no metric {name!r}: {choose(name, sorted(registry()))}", metric=name)
    return registry()[name]
