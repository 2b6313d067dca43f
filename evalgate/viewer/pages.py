"""The viewer's pages: the table of everything found, one run as text, and two candidates side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from evalgate.core import counted
from evalgate.errors import EvalgateError
from evalgate.gate.compare import METRICS, PairedRuns, paired_runs
from evalgate.measure.stored import read_run
from evalgate.printable import printable
from evalgate.reports import _board_page, paired, terminal
from evalgate.reports._leaderboard import sentence
from evalgate.reports._numbers import figure_text
from evalgate.reports._words import HEADLINES
from evalgate.viewer.found import Found

if TYPE_CHECKING:
    from evalgate.summary import Comparison, Group

REPORT, SWEEP_PAGE, BLOCK = "report.html", "sweep.html", "block"
_WIDTH = 110  # columns of a run as text
_FIGURES = (("kl", "mean"), ("top1_agreement", "mean"), ("perplexity", "ratio"))
_HEADS = ("run", "candidate", "reference", "mean KL (nats)", "same top-1", "PPL ratio", "positions", "made (UTC)")
_STYLE = """
header, main { max-width: 84rem }
.made { white-space: nowrap }
pre { overflow-x: auto; background: var(--tint); padding: .8rem; font-size: 13px }
td input { width: 1.3rem; height: 1.3rem; margin: 0 }
form > p { margin: .8rem 0 }
"""


def index(found: Sequence[Found], roots: Sequence[str]) -> str:
    """Everything that was found: runs by candidate, sweeps, and what cannot be read."""
    runs = [one for one in found if one.summary is not None]
    boards = [one for one in found if one.board is not None]
    broken = [one for one in found if one.reason]
    parts = [
        f'<p class="soft">{counted(len(runs), "run")} and {counted(len(boards), "sweep")} in '
        f"{_safe(', '.join(roots))}</p>"
    ]
    if boards:
        parts += ["<h2>Sweeps</h2><dl>", *(_sweep(one) for one in boards), "</dl>"]
    if runs:
        parts += list(_runs(runs))
    if broken:
        parts += ["<h2>Cannot be read</h2><dl>", *(_row_of_broken(one) for one in broken), "</dl>"]
    if not found:
        parts.append("<p>There is no run here yet: <code>evalgate kl --ref demo --cand demo@int8</code> makes one.</p>")
    return _board_page.page("evalgate view", "Runs", "\n".join(parts), style=_STYLE, forms=True)


def _sweep(one: Found) -> str:
    board = one.board
    assert board is not None
    name = f'<a href="/sweep/{one.key}/{SWEEP_PAGE}">{_safe(one.name)}</a>'
    when = f'<small class="made">{_safe(made(board.created))}</small>'
    return f"<dt>{name}</dt><dd>{_safe(sentence(board))} {when}</dd>"


def _row_of_broken(one: Found) -> str:
    return f"<dt>{_safe(one.name)}</dt><dd>{_safe(one.reason)}</dd>"


def _runs(runs: Sequence[Found]) -> Iterator[str]:
    yield '<h2 id="runs">Runs by candidate</h2><form action="/pair" method="get">'
    yield '<div class="wide" tabindex="0" role="region" aria-labelledby="runs"><table class="sortable"><thead><tr>'
    yield '<th scope="col">A</th><th scope="col">B</th>'
    for head in _HEADS:
        number = ' class="number"' if head in _HEADS[3:7] else ""
        yield f'<th scope="col"{number}><button type="button">{escape(head)}</button></th>'
    yield "</tr></thead><tbody>"
    for one in runs:
        assert one.summary is not None
        for place, comparison in enumerate(one.summary.comparisons):
            yield _row(one, place, comparison)
    yield "</tbody></table></div>"
    yield '<p><button type="submit">Compare A with B</button></p></form>'


def _row(one: Found, place: int, comparison: Comparison) -> str:
    summary = one.summary
    assert summary is not None
    page = REPORT if (one.path / REPORT).is_file() else BLOCK
    candidate = comparison.candidate.spec
    choice = f"{one.key}.{place}"
    said = _safe(f"{one.name}, {candidate}")
    picks = "".join(
        f'<td><input type="radio" name="{s}" value="{choice}" aria-label="{s.upper()}: {said}" required></td>'
        for s in "ab"
    )
    reference = summary.reference.spec if summary.reference is not None else ""
    figures = "".join(_figure(comparison.overall, metric, statistic) for metric, statistic in _FIGURES)
    positions = comparison.overall.positions
    return (
        f'<tr>{picks}<th scope="row" data-v="{_safe(one.name)}"><a href="/run/{one.key}/{page}">{_safe(one.name)}</a>'
        f'<small>{escape(summary.kind)}, <a href="/run/{one.key}/{BLOCK}">as text</a></small></th>'
        f"<td><code>{_safe(candidate)}</code></td><td><code>{_safe(reference) or '-'}</code></td>{figures}"
        f'<td class="number" data-v="{positions}">{positions:,}</td>'
        f'<td class="made">{_safe(made(summary.created))}</td></tr>'
    )


def _figure(group: Group, name: str, statistic: str) -> str:
    """A cell with a figure and its interval; with its lower bound where no more is known."""
    metric = group.metrics.get(name)
    statistics = {} if metric is None else metric.statistics
    found = statistics.get(statistic) or statistics.get(f"{statistic}_low")
    if metric is None or found is None:
        return '<td class="number" data-v="">-</td>'
    text = figure_text(found.value, found.interval, unit=metric.unit, documents=group.documents)
    value = text.value if statistic in statistics else f">= {text.value}"
    return f'<td class="number" data-v="{found.value!r}">{escape(value)}<small>{escape(text.interval)}</small></td>'


def made(created: str) -> str:
    """A time to the minute: `2026-12-01 11:53`, in UTC."""
    return created[:16].replace("T", " ")


def block(one: Found) -> str:
    """One run as the terminal shows it."""
    assert one.summary is not None
    text = terminal.render(one.summary, width=_WIDTH)
    body = f'<p><a href="/">All runs</a></p><pre tabindex="0">{escape(printable(text, lines=True))}</pre>'
    return _board_page.page(one.name, _safe(one.name), body, style=_STYLE)


def pair(first: tuple[Found, int], second: tuple[Found, int]) -> str:
    """Two candidates side by side, and their paired difference where they were scored at the same positions."""
    sides = [_side(*first), _side(*second)]
    parts = ['<p><a href="/">All runs</a></p>', *_side_by_side(sides), "<h2>Paired difference, A minus B</h2>"]
    try:
        parts.append(_paired(first[0], sides[0][1], second[0], sides[1][1]))
    except EvalgateError as error:
        parts.append(f"<p>They are not paired: {_safe(error.message)}</p>")
    return _board_page.page("A and B", "Side by side", "\n".join(parts), style=_STYLE)


def _side(one: Found, place: int) -> tuple[str, Comparison, str]:
    """The name of a run, the comparison in it, and the run's kind. Raises LookupError where there is none."""
    if one.summary is None or not 0 <= place < len(one.summary.comparisons):
        raise LookupError(one.name)
    return one.name, one.summary.comparisons[place], one.summary.kind


def _side_by_side(sides: Sequence[tuple[str, Comparison, str]]) -> Iterator[str]:
    metrics = dict.fromkeys((m, s, head) for _, _, kind in sides for m, s, head in HEADLINES[kind])
    yield "<table><thead><tr><th scope='col'>figure</th>"
    for letter, (name, comparison, _) in zip("AB", sides, strict=True):
        spec = _safe(comparison.candidate.spec)
        yield f"<th scope='col'>{letter}: {_safe(name)}<small><code>{spec}</code></small></th>"
    yield "</tr></thead><tbody>"
    for metric, statistic, head in metrics:
        cells = "".join(_figure(comparison.overall, metric, statistic) for _, comparison, _ in sides)
        yield f"<tr><th scope='row'>{escape(head)}</th>{cells}</tr>"
    domains = dict.fromkeys(domain.name for _, comparison, _ in sides for domain in comparison.domains)
    if len(domains) > 1 and all("kl" in comparison.overall.metrics for _, comparison, _ in sides):
        for name in domains:
            groups = [next((d for d in c.domains if d.name == name), None) for _, c, _ in sides]
            cells = "".join("<td>-</td>" if g is None else _figure(g, "kl", "mean") for g in groups)
            yield f"<tr><th scope='row'>mean KLD, {_safe(name)}</th>{cells}</tr>"
    yield "</tbody></table>"


def _paired(first: Found, one: Comparison, second: Found, two: Comparison) -> str:
    found: PairedRuns
    (found,) = paired_runs(
        read_run(first.path),
        read_run(second.path),
        candidates=(one.candidate.name, two.candidate.name),
        metrics=METRICS,
        confidence=0.95,
    )
    return f'<pre tabindex="0">{escape(printable(paired.render(found), lines=True))}</pre>'


def _safe(text: str) -> str:
    return escape(printable(text))
