"""Whether a summary says what its table does: every figure is made again from the table, without intervals.

Intervals depend on the version that made them and take seconds; of them it is checked that they hold their figure and
stay inside the metric's range.
"""

from __future__ import annotations

from itertools import combinations
from math import isclose

from evalgate.errors import ScoreError
from evalgate.metrics import Metric, registry
from evalgate.stats.excess import excess
from evalgate.stats.ranking import place_of
from evalgate.stats.summarize import GroupValues, Made
from evalgate.summary import Comparison, Group, StoredFigure, Summary

_RELATIVE, _ABSOLUTE = 1e-6, 1e-9  # other processors and libraries add in another order


def check_supported(summary: Summary, made: Made) -> None:
    """Check that a summary is one of the table that `made` was made of (`summarize.values`).

    Raises:
        ScoreError: names the candidate and the first odd figure; its message ends a sentence about the summary.
    """
    candidates = list(dict.fromkeys(candidate for candidate, _ in made))
    said = [comparison.candidate.name for comparison in summary.comparisons]
    if said != candidates:
        raise ScoreError(f"lists the candidates {', '.join(said)} where the table has {', '.join(candidates)}")
    for comparison in summary.comparisons:
        name = comparison.candidate.name
        _check_group(name, comparison.overall, made[name, None])
        domains = [domain for candidate, domain in made if candidate == name and domain is not None]
        if [group.name for group in comparison.domains] != domains:
            raise ScoreError(f"lists other domains of {name} than the table has ({', '.join(domains)})")
        for group in comparison.domains:
            _check_group(name, group, made[name, group.name])
        _check_excess(comparison)
    _check_ranking(summary)


def _check_group(candidate: str, group: Group, made: GroupValues) -> None:
    where = f"of {candidate} ({group.name})"
    for count, right in made.counts.items():
        if getattr(group, count) != right:
            raise ScoreError(f"says {getattr(group, count):,} {count} {where} where the table has {right:,}")
    for name, metric in group.metrics.items():
        for statistic, figure in metric.statistics.items():
            right_value = made.metrics.get(name, {}).get(statistic)
            what = f"{name}.{statistic} {where}"
            if right_value is None:
                raise ScoreError(f"gives {what}, which the table does not have")
            if not _close(figure.value, right_value):
                raise ScoreError(f"says {figure.value:.9g} for {what} where the table gives {right_value:.9g}")
            _check_interval(what, figure)


def _check_interval(what: str, figure: StoredFigure) -> None:
    slack = _ABSOLUTE + _RELATIVE * abs(figure.value)
    below = figure.low is not None and figure.low > figure.value + slack
    above = figure.high is not None and figure.high < figure.value - slack
    if below or above or (figure.se is not None and figure.se < 0) or not 0 < figure.confidence < 1:
        raise ScoreError(f"gives {what} an interval from {figure.low} to {figure.high}, which cannot be one of it")


def _check_excess(comparison: Comparison) -> None:
    """The excess over the noise floor is that of the figures beside it; what the floor rests on is not kept."""
    if comparison.noise is None:
        return
    for name, kept in comparison.noise.excess.items():
        for statistic, figure in kept.items():
            own = comparison.overall.metrics.get(name)
            floor = comparison.noise.figures.get(name, {}).get(statistic)
            if name not in registry() or own is None or floor is None or statistic not in own.statistics:
                raise ScoreError(f"gives an excess of {name}.{statistic} without the figure or its floor")
            right = excess(own.statistics[statistic].figure, floor.figure, registry()[name].better).value
            if right is None or not _close(figure.value, right):
                raise ScoreError(f"says {figure.value:.9g} for the excess of {name}.{statistic}, which is {right}")


def _check_ranking(summary: Summary) -> None:
    """A ranking is of the candidates beside it, by their own figures, and its places are what its pairs prove."""
    ranking = summary.ranking
    if ranking is None:
        return
    names = {comparison.candidate.name for comparison in summary.comparisons}
    ranked = [place.candidate for place in ranking.places]
    if ranking.metric not in registry() or set(ranked) != names or len(ranked) != len(names):
        raise ScoreError(f"ranks {', '.join(ranked)} by {ranking.metric}, which are not its candidates and metrics")
    if [(pair.first, pair.second) for pair in ranking.pairs] != list(combinations(ranked, 2)):
        raise ScoreError("ranks its candidates by other pairs than those there are")
    value = {c.candidate.name: _ranked_value(c.overall, registry()[ranking.metric]) for c in summary.comparisons}
    sign = -1.0 if registry()[ranking.metric].better == "higher" else 1.0
    for pair in ranking.pairs:
        gap = sign * (value[pair.first] - value[pair.second])
        if gap > _ABSOLUTE + _RELATIVE * abs(value[pair.first]):
            raise ScoreError(f"ranks {pair.first} before {pair.second}, whose {ranking.metric} is better")
        if pair.difference is not None:
            _check_interval(f"the difference between {pair.first} and {pair.second}", pair.difference)
    for place in ranking.places:
        if place != place_of(place.candidate, ranking.pairs):
            raise ScoreError(f"gives {place.candidate} the place {place.text}, which its pairs do not")


def _ranked_value(group: Group, metric: Metric) -> float:
    """The figure that a metric ranks by: that of its primary series, or the lower bound of it."""
    statistic = next(s.name for s in metric.statistics if s.kind == "mean" and s.series == metric.primary)
    figures = group.metrics[metric.name].statistics if metric.name in group.metrics else {}
    for name in (statistic, f"{statistic}_low"):
        if name in figures:
            return figures[name].value
    raise ScoreError(f"ranks by {metric.name}, which it does not give")


def _close(a: float, b: float) -> bool:
    return isclose(a, b, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
