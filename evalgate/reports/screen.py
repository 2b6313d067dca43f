"""The first screen: what a run says in 24 lines of 80 columns, and where the rest is.

One sentence per candidate, the five figures that people quote, domains, what was measured, and what a reader must know.
Several candidates stand side by side, the best on top. Where that is too long, notes give way first, then domains, and
of the sentences what the table says already. The report `terminal` has everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from evalgate.core import counted
from evalgate.printable import printable
from evalgate.reports import Report
from evalgate.reports._headline import beside_figures, headline
from evalgate.reports._numbers import BRIEF, FULL, Digits, FigureText, figure_text, interval_text, unknown
from evalgate.reports._rich import block, fact_table, fitted, new_table, printed, safe
from evalgate.reports._words import QUOTED, label

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from evalgate.store.remote import Place
    from evalgate.summary import Comparison, Group, MetricSummary, Summary

HEIGHT = 23  # lines, beside the one that the next command is typed in
_NAME, _LEAST_NAME = 40, 10  # columns of a candidate's name in a sentence, and the fewest in the table
_NOTE = 2  # lines of a note
_LABEL = "intervals"  # the widest of the names of facts
_FULL = "--full"
_TIED = "Shared places, such as 1-2: not told apart, paired by document (Holm over pairs)"


def render(summary: Summary, *, width: int = 80, color: bool = False, folder: Place | None = None) -> str:
    """The screen as text, no line wider than `width` columns; escape sequences only with `color`.

    folder: where the run lies, None = it was not written.
    """
    measured, rest = _measured(summary), [("rest", _rest(folder))]
    foot = _lines([*measured, *rest], width)
    text, room = "", 0
    for parts in _levels(summary, _ranked(summary), width):
        text = printed(parts, width=width, color=color)
        room = HEIGHT - text.count("\n") - len(foot) - 1
        if room >= min(len(summary.notes), 1):
            break
    facts = fact_table([*measured, *_notes(summary.notes, max(room, 1), width), *rest])
    return f"{text}\n{printed([facts], width=width, color=color)}"


def _lines(facts: Sequence[tuple[str, str]], width: int) -> list[str]:
    """The lines that such facts take, however many there are and whatever stands beside them."""
    return printed([fact_table([(_LABEL, ""), *facts])], width=width, color=False).splitlines()[1:]


def _ranked(summary: Summary) -> list[Comparison]:
    """The candidates, best first where they are ranked."""
    if summary.ranking is None:
        return summary.comparisons
    places = {place.candidate: number for number, place in enumerate(summary.ranking.places)}
    return sorted(summary.comparisons, key=lambda comparison: places.get(comparison.candidate.name, len(places)))


def _levels(summary: Summary, ranked: Sequence[Comparison], width: int) -> Iterator[list[RenderableType]]:
    """What is said of the candidates, the fullest first."""
    figures = _alone(summary, ranked[0]) if len(ranked) == 1 else _together(summary, ranked, width)
    whole = [_sentence(summary, one, headline(summary, one)) for one in ranked]
    beside = [(one, beside_figures(summary, one)) for one in ranked]
    gap = block(" ")
    begun = [*whole, gap, *figures] if len(ranked) == 1 else [*figures, gap, *whole]
    for lines in (4, 2, 1) if len(ranked) == 1 else (2, 1):
        domains = _domains(summary, ranked, width, lines)
        yield [*begun, *([gap, *domains] if domains else [])]
    yield begun
    if len(ranked) == 1:
        return
    yield [*figures, gap, *_rests(summary, beside)]
    short = _rests(summary, [(one, beside_figures(summary, one, perplexity=False)) for one in ranked])
    for line in short:
        line.no_wrap, line.overflow = True, "ellipsis"
    yield [*figures, gap, *short]
    yield [*figures]


def _rests(summary: Summary, said: Sequence[tuple[Comparison, str]]) -> list[Text]:
    """A line per candidate that there is something to say of; a single one where that is the same of all."""
    same = {rest for _, rest in said}
    if len(same) == 1 and same != {""}:
        return [safe(f"each: {same.pop()}")]
    return [_sentence(summary, one, rest, columns=_NAME // 2) for one, rest in said if rest]


def _sentence(summary: Summary, comparison: Comparison, said: str, *, columns: int = _NAME) -> Text:
    """A candidate and what is said of it."""
    from rich.text import Text

    alone = len(summary.comparisons) == 1 and summary.reference is not None
    against = f" against {_short(summary.reference.spec)}" if alone and summary.reference else ""
    return Text.assemble(
        safe(_short(comparison.candidate.spec, columns), "bold"), safe(f"{against}: {said}" if said else against)
    )


def _short(spec: str, columns: int = _NAME) -> str:
    return fitted(printable(spec), columns)


def _alone(summary: Summary, comparison: Comparison) -> list[RenderableType]:
    """A line for each of the five figures, with its interval."""
    table = new_table(header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True)
    kinds = _kinds(summary)
    for metric, statistic, _ in QUOTED[summary.kind]:
        text = _figure(comparison.overall, metric, statistic, FULL)
        if text is not None:
            found = comparison.overall.metrics[metric]
            name = label(found, statistic if statistic in found.statistics else f"{statistic}_low").partition(",")
            named = name[0] if statistic not in found.statistics else "".join(name)
            kind = found.exactness if len(kinds) > 1 else ""
            table.add_row(safe(named), safe(text.value), safe(text.interval), safe(kind))
    return [table]


def _together(summary: Summary, ranked: Sequence[Comparison], width: int) -> list[RenderableType]:
    """A line per candidate: its place, its main figure with the interval, the values of the others."""
    noun = "candidate" if summary.reference else "model"
    against = f" against {_short(summary.reference.spec)}" if summary.reference else ""
    order = ", best first" if summary.ranking else ""
    quoted = [q for q in QUOTED[summary.kind] if any(_figure(one.overall, *q[:2], BRIEF) for one in ranked)]
    places = [_place(summary, one) for one in ranked]
    rows, room = _cells(ranked, quoted, width - (max(map(len, places)) + 2 if any(places) else 0))
    table = new_table(header=True)
    for heading in ["", noun] if any(places) else [noun]:
        table.add_column(heading, no_wrap=True)
    for _, _, heading in quoted:
        table.add_column(heading, justify="right", overflow="fold")
    for place, one, row in zip(places, ranked, rows, strict=True):
        name = safe(fitted(printable(one.candidate.spec), room), "bold")
        table.add_row(*([safe(place)] if any(places) else []), name, *map(safe, row))
    title = safe(f"evalgate {summary.kind}{against}: {counted(len(ranked), noun)}{order}", "bold")
    tied = any("-" in place for place in places)
    return [title, table, *([safe(_TIED)] if tied else [])]


def _cells(
    ranked: Sequence[Comparison], quoted: Sequence[tuple[str, str, str]], width: int
) -> tuple[list[list[str]], int]:
    """The figures of each candidate, the first with its interval where names have room beside it, and that room."""
    rows: list[list[str]] = []
    room = 0
    for interval in (True, False):
        rows = [[_cell(one.overall, *q[:2], interval=interval and q is quoted[0]) for q in quoted] for one in ranked]
        columns = zip(*([heading.split("\n") for _, _, heading in quoted], *rows), strict=True)
        room = width - sum(max(map(len, [*heading, *cells])) + 2 for heading, *cells in columns)
        if room >= _LEAST_NAME:
            break
    return rows, max(room, _LEAST_NAME)


def _place(summary: Summary, comparison: Comparison) -> str:
    if summary.ranking is None:
        return ""
    return next((p.text for p in summary.ranking.places if p.candidate == comparison.candidate.name), "")


def _cell(group: Group, metric: str, statistic: str, *, interval: bool) -> str:
    text = _figure(group, metric, statistic, BRIEF)
    if text is None:
        return "-"
    known = text.interval.startswith(("[", "("))
    return f"{text.value} {text.interval}" if interval and known else text.value


def _figure(group: Group, name: str, statistic: str, digits: Digits) -> FigureText | None:
    """A figure with its interval; where only bounds are known, those, and the interval that holds both."""
    metric = group.metrics.get(name)
    if metric is None:
        return None
    figure = metric.statistics.get(statistic)
    if figure is not None:
        interval = replace(figure.interval, label="")  # what they speak of is said once
        return figure_text(figure.value, interval, unit=metric.unit, documents=group.documents, digits=digits)
    return _bounds(metric, statistic, group.documents, digits)


def _bounds(metric: MetricSummary, statistic: str, documents: int, digits: Digits) -> FigureText | None:
    low, high = metric.statistics.get(f"{statistic}_low"), metric.statistics.get(f"{statistic}_high")
    if low is None:
        return None
    ends = [
        figure_text(end.value, end.interval, unit=metric.unit, documents=documents, digits=digits).value
        for end in (low, high)
        if end is not None
    ]
    value = f">= {ends[0]}" if high is None else f"{ends[0]} to {ends[1]}"
    if not low.interval.known:
        return FigureText(value, unknown(documents))
    outer = replace(low.interval, high=None if high is None else high.high, label="")
    return FigureText(value, interval_text(outer, unit=metric.unit, digits=BRIEF))


def _domains(summary: Summary, ranked: Sequence[Comparison], width: int, lines: int) -> list[RenderableType]:
    """The main figure by domain, the worst first, in that many lines for each candidate; none of a single domain."""
    shown = [one for one in ranked if len(one.domains) > 1]
    metric, statistic, heading = QUOTED[summary.kind][0]
    alone = len(ranked) == 1
    names = [f"{heading} by domain" if alone else fitted(printable(one.candidate.spec), _NAME // 2) for one in shown]
    room = width - max(map(len, names), default=0) - 2
    rows = [
        (name, _listed(_by_domain(one, metric, statistic), room, lines)) for name, one in zip(names, shown, strict=True)
    ]
    if not rows:
        return []
    return [safe("by domain", "bold"), fact_table(rows)] if not alone else [fact_table(rows)]


def _by_domain(comparison: Comparison, metric: str, statistic: str) -> list[tuple[str, FigureText]]:
    """Domain and figure, the worst first."""
    found = []
    for domain in comparison.domains:
        text = _figure(domain, metric, statistic, BRIEF)
        if text is not None:
            kept = domain.metrics[metric].statistics
            value = kept[statistic if statistic in kept else f"{statistic}_low"].value
            found.append((value if metric == "top1_agreement" else -value, printable(domain.name), text))
    return [(name, text) for _, name, text in sorted(found, key=lambda one: one[0])]


def _listed(parts: Sequence[tuple[str, FigureText]], room: int, lines: int) -> str:
    """`code 0.0035 [0.0024, 0.0047], prose ...`: without intervals, and then without the last, where it is too long."""
    whole = ", ".join(f"{name} {text.value} {text.interval}".rstrip() for name, text in parts)
    most = lines * room - 12 * (lines - 1)  # lines break between words, which costs a little of each
    if len(whole) <= most:
        return whole
    shown: list[str] = []
    for number, (name, text) in enumerate(parts):
        more = f", and {len(parts) - number} more: {_FULL}"
        part = f"{fitted(name, _NAME // 2)} {text.value}"
        if shown and len(", ".join([*shown, part])) > most - len(more):
            return ", ".join(shown) + more
        shown.append(part)
    return ", ".join(shown)


def _measured(summary: Summary) -> list[tuple[str, str]]:
    group, corpus = summary.comparisons[0].overall, summary.corpus
    within = f"{counted(group.windows, 'window')}, {counted(group.documents, 'document')}"
    skipped = f", {len(corpus.skipped):,} skipped" if corpus.skipped else ""
    measured = f"{counted(group.positions, 'position')} in {within} of {_short(corpus.name)}{skipped}"
    found = [("measured", f"{measured}; {_exactness(summary)}")]
    known = [f for m in group.metrics.values() for f in m.statistics.values() if f.interval.known]
    said = f"{known[0].confidence * 100:.6g} % {known[0].label or 'over documents'}" if known else "none: 1 document"
    return [*found, (_LABEL, said)]


def _exactness(summary: Summary) -> str:
    """`exact`, or which of the five figures are known in which way."""
    kinds = _kinds(summary)
    if len(kinds) == 1:
        return next(iter(kinds))
    less = [f"{', '.join(names)} {kind}" for kind, names in kinds.items() if kind != "exact"]
    return "; ".join([*less, "the rest exact"] if "exact" in kinds else less)


def _kinds(summary: Summary) -> dict[str, list[str]]:
    """How the five figures are known, and which of them."""
    found: dict[str, list[str]] = {}
    for metric, _, heading in QUOTED[summary.kind]:
        kinds = {one.overall.metrics[metric].exactness for one in summary.comparisons if metric in one.overall.metrics}
        for kind in sorted(kinds):
            found.setdefault(kind, []).append(heading.replace("\n", " "))
    return found


def _rest(folder: Place | None) -> str:
    if folder is None:
        return f"every figure: {_FULL}"
    there = isinstance(folder, Path) and (folder / "report.html").exists()
    more = "; report.html has plots and tokens" if there else ""
    return f"{folder}{more}; every figure: evalgate show {_FULL} RUN"


def _notes(notes: Sequence[str], room: int, width: int) -> list[tuple[str, str]]:
    """As many of the notes as fit into `room` lines, long ones cut short, and how many are left out."""
    folded = [[line[len(_LABEL) + 2 :] for line in _lines([("note", " ".join(note.split()))], width)] for note in notes]
    whole = sum(map(len, folded)) <= room
    found: list[tuple[str, str]] = []
    used = 0
    for number, lines in enumerate(folded):
        left = room - used - (number + 1 < len(notes))
        if left < 1:
            return [*found, ("", f"{counted(len(notes) - number, 'more note' if number else 'note')}: {_FULL}")]
        kept = lines if whole else lines[: min(left, _NOTE)]
        if len(kept) < len(lines):
            kept[-1] = f"{fitted(kept[-1], width - len(_LABEL) - 6, keep='start').removesuffix('...')}..."
        found.append(("note", " ".join(kept)))
        used += len(kept)
    return found


REPORT = Report("summary", render, terminal=True, first=True)
