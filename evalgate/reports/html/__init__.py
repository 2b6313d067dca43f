"""The HTML report of a run: one offline file with verdict, headline, plots, the worst tokens in their text, manifest.

`evalgate show RUN --format html` prints it, and every run folder holds one as `report.html`. docs/report.md says what
each part shows. The file is made from the run alone; nothing in it is loaded from anywhere.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from evalgate.core import counted
from evalgate.reports import Report

if TYPE_CHECKING:
    from markupsafe import Markup

    from evalgate.gate.report import GateReport
    from evalgate.store.runs import Run
    from evalgate.summary import Summary

_SHOWN = 3  # names of candidates in the title


def render(run: Run, verdict: GateReport | None = None) -> str:
    """The page of a run; verdict: of the gate that judged it.

    Raises:
        ScoreError: the table holds a value that none can have, or lacks one that a column promises.
    """
    from markupsafe import Markup

    from evalgate.reports import _page
    from evalgate.reports.html import explorer, figures, plots, subjects

    summary = run.summary
    found = subjects.subjects(run)
    drawn = plots.plots(found, subjects.kl_floor(run), run.token_texts)
    explored = explorer.explorer(found, run.token_texts, run.alternatives_table)
    candidates = [_candidate(run, place) for place in _order(summary)]
    names = [comparison.candidate.spec for comparison in summary.comparisons]
    subject = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    body = _page.render(
        __name__,
        "report.html.jinja",
        summary=summary,
        subject=subject,
        eyebrow=_eyebrow(run),
        verdict=verdict,
        verdict_sentence="" if verdict is None else figures.verdict_sentence(verdict),
        rules=[] if verdict is None else [figures.rules(one) for one in verdict.candidates],
        candidates=candidates,
        names=figures.side_by_side([one["quoted"] for one in candidates]),
        ranked=_ranked(summary),
        plots=drawn,
        explorer=explored is not None,
        explorer_text=_explorer_text(explored, known=run.token_texts is not None),
        measured=figures.measured(summary),
        intervals=figures.intervals(summary),
        files=figures.listed_files(run.manifest),
        manifest=Markup(_escaped_lines(json.dumps(run.manifest, indent=2, ensure_ascii=False, default=str))),
        versions=sorted(summary.versions.items()),
        swatch=_swatch,
    )
    sections = [("summary", "Summary"), ("plots", "Plots"), ("tokens", "Tokens"), ("measured", "Measured")]
    sections += [("figures", "All figures"), ("manifest", "Manifest")]
    absent = ({"plots"} if not drawn else set()) | ({"tokens"} if explored is None else set())
    against = f" against {summary.reference.spec}" if summary.reference else ""
    return _page.page(
        title=f"{subject}{against} · evalgate {summary.kind}",
        sections=[one for one in sections if one[0] not in absent],
        body=body,
        footer=f"Made by evalgate {summary.evalgate_version} on {summary.created[:10]}. One file, no requests.",
        styles=[_page.asset(__name__, "report.css")],
        scripts=[_page.asset(__name__, "explorer.js")] if explored is not None else [],
        data={} if explored is None else {"explorer-data": explored},
    )


def _order(summary: Summary) -> list[int]:
    """Places of the candidates in the run, best first where they are ranked."""
    places = list(range(len(summary.comparisons)))
    if summary.ranking is None:
        return places
    best = {place.candidate: rank for rank, place in enumerate(summary.ranking.places)}
    return sorted(places, key=lambda place: best[summary.comparisons[place].candidate.name])


def _candidate(run: Run, place: int) -> dict[str, Any]:
    from evalgate.reports._headline import headline
    from evalgate.reports.html import figures

    summary, comparison = run.summary, run.summary.comparisons[place]
    quoted = figures.quoted(summary, comparison)
    return {
        "name": comparison.candidate.spec,
        "color": place,
        "place": "" if summary.ranking is None else summary.ranking.place(comparison.candidate.name).text,
        "headline": headline(summary, comparison),
        "quoted": quoted,
        "by_name": {one.name: one for one in quoted},
        "everything": [(heading, rows) for heading, rows in figures.everything(summary, comparison)],
    }


def _ranked(summary: Summary) -> str:
    """How the candidates were put in order; "" where they were not."""
    from evalgate.reports._words import METRICS

    ranking = summary.ranking
    if ranking is None:
        return ""
    return (
        f"Best first by {METRICS.get(ranking.metric, ranking.metric)}. Candidates whose places overlap cannot be told "
        f"apart: paired by document, Holm over all pairs, {ranking.confidence * 100:g} %."
    )


def _eyebrow(run: Run) -> str:
    summary = run.summary
    what = {"kl": "Comparison of distributions", "agree": "Comparison of choices", "ppl": "Perplexity"}[summary.kind]
    if not summary.comparisons:
        return what
    group = summary.comparisons[0].overall
    return (
        f"{what} on {summary.corpus.name}: {counted(group.positions, 'position')} of "
        f"{counted(group.documents, 'document')}, {summary.created[:10]}"
    )


def _explorer_text(explored: dict[str, Any] | None, *, known: bool) -> str:
    if explored is None:
        return ""
    what = {
        "kl": "the most KL",
        "regret": "the most regret",
        "step": "the largest change",
        "nll": "the highest NLL",
    }[explored["bad"]["key"]]
    text = (
        f"The positions with {what}, and the worst of each domain and class of token. Each token of the text is tinted "
        "by the same measure; the framed one is the token that was predicted from what stands before it."
    )
    return text if known else f"{text} The run does not hold the texts of its tokens, so ids stand for them."


def _swatch(series: int, kind: str) -> Markup:
    """A sample of a series' mark for a legend."""
    from markupsafe import Markup

    from evalgate.reports._svg.chart import PALETTE, shape

    color = f"s{series % PALETTE}"
    drawn = {
        "mark": f'<path class="mark" d="{shape(7, 6, series)}"/>',
        "bar": '<rect class="bar" x="2" y="2" width="14" height="8"/>',
        "line": '<path class="line" d="M1,6H21"/>',
        "dashed": '<path class="line dashed" d="M1,6H21"/>',
    }[kind]
    width = 14 if kind == "mark" else 22
    return Markup(
        f'<svg class="swatch" viewBox="0 0 {width} 12" aria-hidden="true"><g class="{color}">{drawn}</g></svg>'
    )


def _escaped_lines(text: str) -> str:
    """Text of several lines, fit for a page: control characters visible, markup inert."""
    from markupsafe import escape

    from evalgate.printable import printable

    return str(escape(printable(text, lines=True)))


REPORT = Report("run", render)
