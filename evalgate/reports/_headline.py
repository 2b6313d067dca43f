"""What a run found of one candidate, in one sentence, with which every report opens.

A clause that the run cannot support is left out: without documents enough there is no interval, and no word about
perplexity or domains; without a measured noise floor there is none about noise.
"""

from __future__ import annotations

from math import ceil, floor, inf, log10
from typing import TYPE_CHECKING, NamedTuple

from evalgate.printable import printable
from evalgate.reports._numbers import BRIEF, PERCENT_UNITS, FigureText, figure_text, interval_text

if TYPE_CHECKING:
    from evalgate.gate.report import GateReport
    from evalgate.summary import Comparison, Group, MetricSummary, StoredFigure, Summary

NOISE = "not distinguishable from its own noise"
MOST_TIMES = 1000.0  # a larger multiple of the noise floor is only called that
_SURE = BRIEF._replace(value=1)  # of a figure without its interval beside it
_LONGEST_NAME = 40  # characters of a domain's name


def headline(summary: Summary, comparison: Comparison) -> str:
    """`mean KL 0.0035 [0.0032, 0.0039]: about 40 times the noise floor; ...; worst domain code`.

    Plain text of one line; the names in it are safe on a terminal, and no more than that.
    """
    first, noise, *others = _CLAUSES[summary.kind](summary, comparison)
    return "; ".join(clause for clause in (f"{first}: {noise}" if noise else first, *others) if clause)


def beside_figures(summary: Summary, comparison: Comparison, *, perplexity: bool = True) -> str:
    """The clauses of the headline that no table of figures says, but for the one on perplexity if so; may be empty."""
    parts = _CLAUSES[summary.kind](summary, comparison)
    return "; ".join(clause for clause in (parts.noise, parts.perplexity * perplexity, parts.domain) if clause)


def with_headlines(report: GateReport, summary: Summary) -> GateReport:
    """A gate's document with the headline of every candidate of its run."""
    said = {one.candidate.name: headline(summary, one) for one in summary.comparisons}
    candidates = [one.model_copy(update={"headline": said.get(one.candidate, "")}) for one in report.candidates]
    return report.model_copy(update={"candidates": candidates})


class _Clauses(NamedTuple):
    """A sentence in parts, empty where there is nothing to say. noise: what follows the first figure's colon."""

    first: str
    noise: str = ""
    second: str = ""
    perplexity: str = ""
    domain: str = ""


def _kl(summary: Summary, comparison: Comparison) -> _Clauses:
    group = comparison.overall
    noise = _noise(summary, comparison)
    return _Clauses(
        first=_clause("mean KL", _said(group, "kl", "mean")),
        noise=noise,
        second=_same_token(group, interval=False),
        perplexity=_perplexity(group),
        domain="" if noise == NOISE else _worst_domain(comparison, "kl", "mean", "worst"),
    )


def _agree(summary: Summary, comparison: Comparison) -> _Clauses:
    group = comparison.overall
    flips = _figure(group, "flip", "mean")
    same = _figure(group, "top1_agreement", "mean")
    ties = flips is not None and same is not None and flips.value == 0 and same.value < 1
    regret = _said(group, "regret", "mean")
    return _Clauses(
        first=_same_token(group, interval=True),
        noise=f"every other pick is a tie, {NOISE}" if ties else "",
        second=f"its picks cost {regret} nats a token under the reference" if regret else "",
        perplexity=_perplexity(group),
        domain="" if ties else _worst_domain(comparison, "top1_agreement", "mean", "worst"),
    )


def _ppl(summary: Summary, comparison: Comparison) -> _Clauses:
    group = comparison.overall
    bits = _said(group, "bits_per_byte", "candidate")
    return _Clauses(
        first=_clause("perplexity", _said(group, "perplexity", "candidate")),
        second=f"{bits} bits per byte" if bits else "",
        domain=_worst_domain(comparison, "bits_per_byte", "candidate", "hardest"),
    )


_CLAUSES = {"kl": _kl, "agree": _agree, "ppl": _ppl}


def _clause(name: str, said: str) -> str:
    return f"{name} {said}" if said else ""


def _figure(group: Group, metric: str, statistic: str) -> StoredFigure | None:
    found = group.metrics.get(metric)
    return None if found is None else found.statistics.get(statistic)


def _said(group: Group, name: str, statistic: str, *, interval: bool = True) -> str:
    """A figure with its interval, and what it is where it is not exact; empty where the run does not have it."""
    metric = group.metrics.get(name)
    if metric is None:
        return ""
    figure = metric.statistics.get(statistic)
    if figure is None:
        return _bounded(metric, statistic, interval=interval)
    value, ends = _texts(metric, figure)
    if not interval:
        return _spaced(value)
    shown = _spaced(f"{value} {ends}" if ends else f"{value} (no interval: 1 document)")
    return f"{shown}, estimated" if metric.exactness == "estimated" else shown


def _bounded(metric: MetricSummary, statistic: str, *, interval: bool) -> str:
    """`at least 0.012, at most 0.034 [0.0100, 0.0370]`: the interval goes from the lower bound's to the upper one's."""
    low, high = metric.statistics.get(f"{statistic}_low"), metric.statistics.get(f"{statistic}_high")
    if low is None:
        return ""
    said = f"at least {_texts(metric, low).value}"
    if high is not None:
        said += f", at most {_texts(metric, high).value}"
    if interval and not low.interval.known:
        said += " (no interval: 1 document)"
    elif interval:
        outer = low.interval.between(low.low, None if high is None else high.high)
        said += f" {interval_text(outer, unit=metric.unit, digits=BRIEF)}"
    return _spaced(said)


def _texts(metric: MetricSummary, figure: StoredFigure) -> FigureText:
    """A figure in few digits; a share below the whole in as many as show that it is."""
    text = figure_text(figure.value, figure.interval, unit=metric.unit, documents=2, digits=BRIEF)
    if metric.unit not in PERCENT_UNITS or figure.value >= 1 or float(text.value.rstrip("%")) != 100:
        return text
    rest = 100 * (1 - figure.value)
    return text._replace(value=f"{100 - rest:.{ceil(-log10(rest))}f}%")


def _spaced(text: str) -> str:
    """`96.9 % [96.4, 97.5]`: percent as a sentence has it."""
    return text.replace("]%", "]").replace(")%", ")").replace("%", " %")


def _noise(summary: Summary, comparison: Comparison) -> str:
    """Mean KL as a multiple of the noise floor, or that it may be noise; empty where the floor is not known."""
    metric = comparison.overall.metrics.get("kl")
    kl = {} if metric is None else metric.statistics
    low, high = kl.get("mean", kl.get("mean_low")), kl.get("mean", kl.get("mean_high"))
    known = _floor(summary, comparison)
    if low is None or known is None:
        return ""
    # Without an interval the figure speaks of this text alone, and so does the multiple.
    least = low.low if low.interval.known else low.value
    most = None if high is None else high.high if high.interval.known else high.value
    if most is not None and most <= known:
        return NOISE
    if "mean" in kl and (least is None or least <= known or _is_excess_unproven(comparison)):
        return NOISE
    if known == 0 or least is None or least <= known:
        return ""
    if least > MOST_TIMES * known:
        return f"more than {MOST_TIMES:,.0f} times the noise floor"
    if "mean" not in kl:
        return f"at least {_times(least / known, down=True)} times the noise floor"
    return f"about {_times(low.value / known)} times the noise floor"


def _is_excess_unproven(comparison: Comparison) -> bool:
    """Whether the measured floor, whose own interval counts, leaves open that KL is no larger.

    A floor of 0 at every position has no spread and so an open end, which says nothing of KL: models that repeat
    themselves bit for bit have no noise that could be mistaken for it.
    """
    if comparison.noise is None:
        return False
    floor, excess = (part.get("kl", {}).get("mean") for part in (comparison.noise.figures, comparison.noise.excess))
    return (
        floor is not None
        and floor.value > 0
        and excess is not None
        and excess.interval.known
        and (excess.low is None or excess.low <= 0)
    )


def _floor(summary: Summary, comparison: Comparison) -> float | None:
    """Nats of KL of a model against itself: as measured beside the run, else the larger of the load checks'."""
    if comparison.noise is not None:
        measured = comparison.noise.figures.get("kl", {}).get("mean")
        return None if measured is None else measured.value
    sides = (summary.reference, comparison.candidate)
    floors = [side.kl_floor for side in sides if side is not None and side.kl_floor is not None]
    return max(floors) if len(floors) == len(sides) else None


def _times(ratio: float, *, down: bool = False) -> str:
    """A multiple in two digits, rounded down where it is a bound."""
    decimals = max(1 - floor(log10(ratio)), -1)
    scale = 10.0**decimals
    rounded = (floor(ratio * scale) if down else round(ratio * scale)) / scale
    return f"{rounded:,.{max(decimals, 0)}f}"


def _same_token(group: Group, *, interval: bool) -> str:
    said = _said(group, "top1_agreement", "mean", interval=interval)
    return f"picks the reference's token {said} of the time" if said else ""


def _perplexity(group: Group) -> str:
    """Whether perplexity sees a difference; empty where its ratio has no interval."""
    ratio = _figure(group, "perplexity", "ratio")
    if ratio is None or not ratio.interval.known:
        return ""
    if (ratio.low is None or ratio.low <= 1) and (ratio.high is None or ratio.high >= 1):
        return "perplexity cannot tell the two apart"
    if ratio.value >= 2:
        text = figure_text(ratio.value, ratio.interval, unit="", documents=2, digits=_SURE)
        return f"perplexity is {text.value} times the reference's"
    ends = (ratio.low, ratio.high) if ratio.value > 1 else (ratio.high, ratio.low)
    moved = ratio.interval.between(*(None if end is None else abs(end - 1) for end in ends))
    text = figure_text(abs(ratio.value - 1), moved, unit="fraction", documents=2, digits=_SURE)
    return f"perplexity is {_spaced(text.value)} {'higher' if ratio.value > 1 else 'lower'}"


def _worst_domain(comparison: Comparison, name: str, statistic: str, word: str) -> str:
    """The domain whose interval lies on the wrong side of all others'; empty where there is no telling."""
    ranges = [_range(domain, name, statistic) for domain in comparison.domains]
    if len(ranges) < 2 or any(one is None for one in ranges):
        return ""
    known = [one for one in ranges if one is not None]
    if name == "top1_agreement":
        known = [(-high, -low) for low, high in known]
    worst = max(range(len(known)), key=lambda i: known[i][0])
    if any(known[worst][0] <= high for i, (_, high) in enumerate(known) if i != worst):
        return "no domain stands out" if all(high < inf for _, high in known) else ""
    called = printable(comparison.domains[worst].name)
    return f"{word} domain {called if len(called) <= _LONGEST_NAME else called[: _LONGEST_NAME - 3] + '...'}"


def _range(group: Group, name: str, statistic: str) -> tuple[float, float] | None:
    """Where a domain's figure lies, ends that are open infinite; None where it has no interval."""
    low, high = _figure(group, name, statistic), _figure(group, name, statistic)
    if low is None:
        low, high = _figure(group, name, f"{statistic}_low"), _figure(group, name, f"{statistic}_high")
    if low is None or not low.interval.known:
        return None
    return (
        -inf if low.low is None else low.low,
        inf if high is None or high.high is None else high.high,
    )
