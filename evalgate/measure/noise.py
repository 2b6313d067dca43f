"""The noise floor of a run: what its metrics say of each model against itself, computed another way.

Three conditions, on a sample of the run's windows: other batch shapes (every window by itself against many together,
exact from the full distributions), once more on the warm server in another order, and after a restart of the server.
The last two compare with the scores that the run has, which hold the actual token's probability but no distribution:
means of divergences are then estimated from it (r - 1 - ln r with r = q/p, and |r - 1| / 2 for tv). Single terms of
such a mean are no divergences, so percentiles and extremes of these come from the whole distributions alone; other pair
metrics are left out. The floor of a figure is the worst of all conditions and of both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from evalgate.core import Figure, Window
from evalgate.errors import ScoreError
from evalgate.summary import Group, Noise, StoredFigure
from evalgate.table import KEY_COLUMNS, SIDE_COLUMNS

if TYPE_CHECKING:
    import pyarrow as pa

    from evalgate.metrics import Metric

SHARE, MOST, LEAST = 8, 8, 2  # every SHARE-th window, at most MOST and at least LEAST
ESTIMATED = ("kl", "reverse_kl", "js", "tv")  # from the actual tokens, where no distribution was kept
SHAPES, WARM, RESTART = "other batch shapes", "warm, in another order", "after a restart"

# (reference, candidates, windows, apart) -> token-score table
Ask = Callable[[str, Sequence[str], Sequence[Window], bool], "pa.Table"]


@dataclass(frozen=True)
class Itself:
    """A model against itself under one condition; table: evalgate.table.schema, perhaps without some pair columns."""

    model: str
    condition: str
    table: pa.Table


def sample(windows: Sequence[Window]) -> list[Window]:
    """Windows evenly spaced over the run's order, and of every domain at least LEAST documents where it has them.

    A floor from one document has no interval.
    """
    count = min(len(windows), max(LEAST, min(MOST, len(windows) // SHARE)))
    chosen = {i * len(windows) // count for i in range(count)}
    for domain in dict.fromkeys(w.domain for w in windows):
        shown = {windows[i].document for i in chosen if windows[i].domain == domain}
        firsts: dict[str, int] = {}  # of the domain's other documents
        for i, window in enumerate(windows):
            if window.domain == domain and window.document not in shown:
                firsts.setdefault(window.document, i)
        chosen.update(list(firsts.values())[: max(0, LEAST - len(shown))])
    return [windows[i] for i in sorted(chosen)]


def shapes(ask: Ask, models: Iterable[str], windows: Sequence[Window]) -> list[Itself]:
    """Every model against itself, many windows together against one at a time: exact."""
    return [Itself(m, SHAPES, ask(m, [m], list(reversed(windows)), True)) for m in dict.fromkeys(models)]


def again(
    condition: str, ask: Ask, reference: str, candidates: Sequence[str], windows: Sequence[Window], table: pa.Table
) -> list[Itself]:
    """Every model scored once more, against the scores that the run's table has of it.

    Raises:
        ScoreError: the two do not have the same positions.
    """
    second = ask(reference, candidates, list(reversed(windows)), False)
    found = [Itself(reference, condition, _paired(table, second, candidates[0], windows, side="ref"))]
    return found + [
        Itself(name, condition, _paired(table, second, name, windows, side="cand"))
        for name in candidates
        if name != reference
    ]


def noise(
    floors: Sequence[Itself],
    *,
    reference: str,
    candidate: str,
    overall: Group,
    domains: Sequence[Group],
    tie: float | None,
    confidence: float,
) -> Noise:
    """The floors of one comparison's figures, and how far its figures are worse.

    overall, domains: the comparison's figures. tie: nats, see `Source.noise_floor`.
    """
    from evalgate.metrics import get
    from evalgate.stats.excess import excess

    ours = [one for one in floors if one.model in (reference, candidate)]
    groups = [_groups(one, tie=tie, confidence=confidence) for one in ours]
    figures = _worst([(one, whole) for one, (whole, _) in zip(ours, groups, strict=True)], overall)
    by_domain = {}
    for domain in domains:
        parts = [(one, g) for one, (_, found) in zip(ours, groups, strict=True) for g in found if g.name == domain.name]
        by_domain[domain.name] = _stored(_worst(parts, domain))
    above: dict[str, dict[str, Figure]] = {}
    for name, kept in figures.items():
        for statistic, floor in kept.items():
            own = overall.metrics[name].statistics.get(statistic)
            if own is not None:
                above.setdefault(name, {})[statistic] = excess(own.figure, floor, get(name).better)
    first = ours[0].table
    return Noise(
        conditions=[f"{one.model}: {one.condition}" for one in ours],
        windows=len(set(first.column("window").to_pylist())),
        positions=first.num_rows,
        figures=_stored(figures),
        domains=by_domain,
        excess=_stored(above),
    )


def _groups(one: Itself, *, tie: float | None, confidence: float) -> tuple[Group, list[Group]]:
    """The figures of all positions, and of each domain."""
    from evalgate.stats.summarize import summarize

    ((_, overall, domains),) = summarize(one.table, kind="kl", noise_floor=tie, confidence=confidence)
    return overall, domains


def _worst(found: Iterable[tuple[Itself, Group]], own: Group) -> dict[str, dict[str, Figure]]:
    """metric -> statistic -> the worst figure of a model against itself, of the metrics that `own` has."""
    from evalgate.metrics import get

    figures: dict[str, dict[str, Figure]] = {}
    for one, group in found:
        for name, metric in group.metrics.items():
            for statistic, stored in metric.statistics.items():
                if _is_floor(one, name, statistic) and name in own.metrics:
                    kept, figure = figures.setdefault(name, {}), _unsigned(stored.figure, get(name), statistic)
                    kept[statistic] = _worse(kept.get(statistic), figure, get(name).better)
    return figures


def _stored(figures: Mapping[str, Mapping[str, Figure]]) -> dict[str, dict[str, StoredFigure]]:
    return {name: {s: StoredFigure.of(f) for s, f in kept.items()} for name, kept in figures.items()}


def _is_floor(one: Itself, metric: str, statistic: str) -> bool:
    """Whether this figure of a model against itself is a floor: a difference, measured or estimated without bias."""
    whole = one.condition == SHAPES or metric not in ESTIMATED
    return _is_difference(metric, statistic) and (whole or statistic == "mean")


def _is_difference(metric: str, statistic: str) -> bool:
    """Whether a figure compares two models, so that it is a floor when both are the same."""
    from evalgate.metrics import get

    found = get(metric)
    series = next((s.series for s in found.statistics if s.name == statistic), "")
    return found.pair or series in ("difference", "log_ratio")


def _unsigned(figure: Figure, metric: Metric, statistic: str) -> Figure:
    """A signed difference without its sign: which of the two scorings came first means nothing."""
    from evalgate.stats.excess import size

    if metric.pair:
        return figure
    if metric.name == "perplexity" and statistic == "ratio":
        value = figure.known
        if value >= 1:
            return figure
        low, high = (None if end is None else 1 / end for end in (figure.high, figure.low))
        return replace(figure.between(low, high), value=1 / value, se=None)
    unsigned = size(figure)
    return unsigned if figure.low is not None else unsigned.between(None, unsigned.high)


def _worse(a: Figure | None, b: Figure, better: str) -> Figure:
    if a is None:
        return b
    if better == "higher":
        return min(a, b, key=lambda f: f.known)
    return max(a, b, key=lambda f: abs(f.known) if better == "zero" else f.known)


def _paired(first: pa.Table, second: pa.Table, candidate: str, windows: Sequence[Window], *, side: str) -> pa.Table:
    """One model's two scorings as a table of reference (first) and candidate (second), divergences estimated."""
    import numpy as np
    import pyarrow as pa

    indices = pa.array([w.index for w in windows])
    one, two = (_rows(table, candidate, indices) for table in (first, second))
    for name in ("window", "position", "token"):
        if one.num_rows != two.num_rows or not one.column(name).equals(two.column(name)):
            raise ScoreError(f"{candidate} came back with other positions when it was scored again: report this run")
    columns: dict[str, Any] = {name: one.column(name) for name in KEY_COLUMNS}
    for name in SIDE_COLUMNS:
        columns[f"ref_{name}"] = one.column(f"{side}_{name}")
        columns[f"cand_{name}"] = two.column(f"{side}_{name}")
    step = one.column(f"{side}_nll").to_numpy().astype(np.float64) - two.column(f"{side}_nll").to_numpy()
    divergence = np.maximum(np.expm1(step) - step, 0.0)
    columns |= {"kl": divergence, "reverse_kl": divergence, "js": np.minimum(divergence / 4, np.log(2))}
    columns["tv"] = np.minimum(np.abs(np.expm1(step)) / 2, 1.0)
    return pa.table(columns)


def _rows(table: pa.Table, candidate: str, windows: pa.Array) -> pa.Table:
    import pyarrow.compute as pc

    keep = pc.and_(
        pc.equal(table.column("candidate").cast("string"), candidate), pc.is_in(table.column("window"), windows)
    )
    found: pa.Table = table.filter(keep).sort_by([("window", "ascending"), ("position", "ascending")])
    return found.combine_chunks()
