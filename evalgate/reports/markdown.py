"""Markdown for a model card or a pull request: what was found in one sentence, the figures, what they rest on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from evalgate.core import counted
from evalgate.printable import printable
from evalgate.reports import Report
from evalgate.reports._headline import headline
from evalgate.reports._numbers import figure_text
from evalgate.reports._verdicts import cell
from evalgate.reports._words import HEADLINES

if TYPE_CHECKING:
    from evalgate.summary import Comparison, Group, MetricSummary, Summary


def render(summary: Summary) -> str:
    """The run as Markdown: candidates best first where they are ranked, and a table by domain where there are some."""
    return "".join(f"{line}\n" for line in _lines(summary))


def _lines(summary: Summary) -> Iterator[str]:
    comparisons = _best_first(summary)
    against = f" against {_name(summary.reference.spec)}" if summary.reference else ""
    sentences = [f"**{_name(one.candidate.spec)}**{against}: {_text(headline(summary, one))}." for one in comparisons]
    yield from sentences if len(sentences) == 1 else (f"- {sentence}" for sentence in sentences)
    yield ""
    noun = "candidate" if summary.reference else "model"
    places = {} if summary.ranking is None else {place.candidate: place.text for place in summary.ranking.places}
    lead = ["place", noun] if places else [noun]
    rows = [[places.get(one.candidate.name, "-")] * bool(places) + [_name(one.candidate.spec)] for one in comparisons]
    yield from _table(summary.kind, lead, rows, [one.overall for one in comparisons])
    domains = [(one, group) for one in comparisons if len(one.domains) > 1 for group in one.domains]
    if domains:
        yield ""
        named = [
            [_name(group.name)] if len(comparisons) == 1 else [_name(one.candidate.spec), _name(group.name)]
            for one, group in domains
        ]
        lead = ["domain"] if len(comparisons) == 1 else [noun, "domain"]
        yield from _table(summary.kind, lead, named, [group for _, group in domains])
    yield ""
    yield _basis(summary)
    if summary.notes:
        yield ""
        yield from (f"- {_text(note)}" for note in summary.notes)


def _best_first(summary: Summary) -> list[Comparison]:
    if summary.ranking is None:
        return list(summary.comparisons)
    order = {place.candidate: number for number, place in enumerate(summary.ranking.places)}
    return sorted(summary.comparisons, key=lambda one: order.get(one.candidate.name, len(order)))


def _table(kind: str, lead: Sequence[str], names: Sequence[Sequence[str]], groups: Sequence[Group]) -> Iterator[str]:
    """A row a group: the names that lead it, then the headline figures that some group has."""
    shown = [h for h in HEADLINES[kind] if any(_figure(group, h[0], h[1]) for group in groups)]
    yield f"| {' | '.join([*lead, *(_heading(groups, *h) for h in shown)])} |"
    yield f"|{'---|' * len(lead)}{'---:|' * len(shown)}"
    for name, group in zip(names, groups, strict=True):
        cells = [*name, *(cell(_figure(group, metric, statistic) or "-") for metric, statistic, _ in shown)]
        yield f"| {' | '.join(cells)} |"


def _heading(groups: Sequence[Group], metric: str, statistic: str, words: str) -> str:
    """The column's name, with a unit that its cells do not write."""
    unit = next(group.metrics[metric].unit for group in groups if metric in group.metrics)
    return f"{words} (nats)" if unit == "nats" else words


def _figure(group: Group, name: str, statistic: str) -> str | None:
    """Value and interval; the lower bound, marked as one, where only bounds are known; None where neither is."""
    metric = group.metrics.get(name)
    if metric is None:
        return None
    figure, bound = metric.statistics.get(statistic), metric.statistics.get(f"{statistic}_low")
    shown = figure or bound
    if shown is None:
        return None
    text = figure_text(shown.value, shown.interval, unit=metric.unit, documents=group.documents)
    mark = f"{'' if figure else '>= '}{text.value} {text.interval}".strip()
    return f"{mark}{_exactness(metric) if figure else ''}"


def _name(name: str) -> str:
    """A name as code, in which nothing is markup or a mention; `|` would end a cell even there."""
    shown = printable(" ".join(name.split())).replace("|", "\\|") or "-"
    runs = re.findall("`+", shown)
    fence = "`" * (max(map(len, runs), default=0) + 1)
    space = " " if shown[0] == "`" or shown[-1] == "`" else ""
    return f"{fence}{space}{shown}{space}{fence}"


def _text(text: str) -> str:
    """Words in which nothing is markup; a comment that nobody sees keeps `@name` from being a mention."""
    return cell(text).replace("@\u200b", "@<!-- -->")


def _exactness(metric: MetricSummary) -> str:
    return " (estimated)" if metric.exactness == "estimated" else ""


def _basis(summary: Summary) -> str:
    """What was measured, and with what: enough to measure it again."""
    corpus, group = summary.corpus, summary.comparisons[0].overall
    measured = f"{counted(group.positions, 'position')} in {counted(group.windows, 'window')}"
    text = f"{measured} of {counted(group.documents, 'document')} of {corpus.name} (hash {corpus.hash[:16]})"
    cut = f"{corpus.window_preset} windows of {corpus.context} tokens"
    known = [
        figure for metric in group.metrics.values() for figure in metric.statistics.values() if figure.interval.known
    ]
    intervals = f"{known[0].confidence * 100:g} % intervals {known[0].label or 'over documents'}" if known else ""
    made = f"evalgate {summary.evalgate_version}, {summary.created[:10]}"
    return _text(", ".join(part for part in (text, cut, intervals, f"seed {summary.seed}", made) if part)) + "."


REPORT = Report("summary", render)
