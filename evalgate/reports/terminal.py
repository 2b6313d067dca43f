"""The terminal report: the closing block of llama-perplexity, with intervals and what they rest on.

Columns are a figure, its value and its interval; `~0` marks a figure that the noise floor could have made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from evalgate.core import counted, sized
from evalgate.reports import Report
from evalgate.reports._headline import headline
from evalgate.reports._noise import conditions, noise_rows
from evalgate.reports._numbers import FigureText, figure_text, plain, unknown
from evalgate.reports._rich import block, fact_table, new_table, printed, safe, title
from evalgate.reports._words import HEADLINES, is_noise, label, ordered, sections

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from evalgate.summary import Comparison, Group, MetricSummary, Noise, Source, Summary

INDISTINGUISHABLE = "not distinguishable from zero"
NOISE_MARK = "~0"


def render(summary: Summary, *, width: int = 80, color: bool = False) -> str:
    """The block as text, no line wider than `width` columns; escape sequences only with `color`."""
    return printed(_parts(summary), width=width, color=color)


def _parts(summary: Summary) -> Iterable[RenderableType]:
    against = f" against {summary.reference.spec}" if summary.reference else ""
    yield title(f"evalgate {summary.kind}{against}")
    yield fact_table(_run_facts(summary))
    if len(summary.comparisons) > 1:
        noun = _side(summary)
        yield title(f"{noun.capitalize()}s side by side")
        groups = [(comparison.candidate.spec, comparison.overall) for comparison in summary.comparisons]
        yield _side_by_side(summary.kind, noun, groups)
    for comparison in summary.comparisons:
        yield from _comparison(summary, comparison)
    if summary.notes:
        yield title("Notes")
        yield fact_table([("-", note) for note in summary.notes])


def _side(summary: Summary) -> str:
    return "candidate" if summary.reference else "model"


def _run_facts(summary: Summary) -> list[tuple[str, str]]:
    corpus = summary.corpus
    limit = "" if corpus.limit is None else f", limited to {counted(corpus.limit, 'window')}"
    size = f"{counted(corpus.documents, 'document')}, {counted(corpus.tokens, 'token')}"
    facts = [
        ("corpus", f"{corpus.name}: {size}, hash {corpus.hash[:16]}"),
        ("windows", f"{corpus.window_preset}, context {corpus.context}, stride {corpus.stride}{limit}"),
    ]
    if corpus.skipped:
        facts.append(("skipped", _skipped(summary)))
    if summary.reference:
        facts.append(("reference", _source(summary.reference)))
    made = f"{summary.created} in {summary.seconds:.1f} s, seed {summary.seed}, evalgate {summary.evalgate_version}"
    return [*facts, ("run", made)]


def _skipped(summary: Summary, *, shown: int = 3) -> str:
    skipped = summary.corpus.skipped
    named = "; ".join(f"{one.name} ({one.reason})" for one in skipped[:shown])
    rest = f"; and {len(skipped) - shown} more" if len(skipped) > shown else ""
    return f"{counted(len(skipped), 'document')}: {named}{rest}"


def _source(source: Source) -> str:
    """Everything about a source that changes a number."""
    named = (
        ("weights", source.dtype),
        ("compute", source.compute_dtype + (f" ({source.compute_reason})" if source.compute_reason else "")),
        ("logits", source.logits_dtype),
        ("loaded", source.load_mode),
        ("scheme", source.scheme),
        ("backend", source.backend),
        ("attention", source.attention),
        ("hash", source.weights_hash[:16]),
    )
    floor = "not measured"
    if source.noise_floor is not None:
        floor = f"{plain(source.noise_floor)} nats of logprob"
        floor += "" if source.kl_floor is None else f", {plain(source.kl_floor)} nats of KL"
    parts = [source.kind, *(f"{name} {value}" for name, value in named if value), f"noise floor {floor}"]
    return f"{source.spec}: {', '.join(parts)}"


def _comparison(summary: Summary, comparison: Comparison) -> Iterable[RenderableType]:
    group = comparison.overall
    floor = _kl_floor(summary, comparison)
    yield title(f"{_side(summary).capitalize()} {comparison.candidate.spec}")
    yield safe(headline(summary, comparison))
    yield fact_table(_comparison_facts(summary, comparison))
    for name, metrics in sections(summary.kind, group):
        yield title(f"{name} ({_exactness(metrics)})")
        yield _figures(metrics, group.documents, floor)
    if floor is not None and any(is_noise(m, name, floor) for m in group.metrics.values() for name in ordered(m)):
        yield block(f"\n{NOISE_MARK}: {INDISTINGUISHABLE} (at or below the KL noise floor, {plain(floor)} nats)")
    if comparison.noise is not None:
        yield title("Above the noise floor")
        yield _noise(group, comparison.noise)
        yield safe(f"measured: {conditions(comparison.noise)}")
    if comparison.candidate.layers:
        yield title("Layers")
        yield _layers(comparison.candidate)
    if len(comparison.domains) > 1:
        yield title("By domain")
        rows = [*((domain.name, domain) for domain in comparison.domains), ("all", group)]
        yield _side_by_side(summary.kind, "domain", rows)


def _comparison_facts(summary: Summary, comparison: Comparison) -> list[tuple[str, str]]:
    group = comparison.overall
    within = f"{counted(group.windows, 'window')} of {counted(group.documents, 'document')}"
    measured = f"{counted(group.positions, 'position')} in {within}, {counted(group.bytes, 'byte')} of text"
    return [
        (_side(summary), _source(comparison.candidate)),
        ("measured", measured),
        ("intervals", _intervals(group)),
    ]


def _intervals(group: Group) -> str:
    figures = [figure for metric in group.metrics.values() for figure in metric.statistics.values()]
    known = [figure for figure in figures if figure.interval.known]
    if not known:
        return unknown(group.documents)
    methods = ", ".join(dict.fromkeys(name for figure in known for name in figure.method.split(", ")))
    return f"{known[0].confidence * 100:.6g} % {known[0].label or 'over documents'} ({methods})"


def _kl_floor(summary: Summary, comparison: Comparison) -> float | None:
    """Nats: the larger KL floor of the two sides; None where neither was measured, or without a reference."""
    if summary.reference is None:
        return None
    floors = [side.kl_floor for side in (summary.reference, comparison.candidate) if side.kl_floor is not None]
    return max(floors, default=None)


def _exactness(metrics: Sequence[MetricSummary]) -> str:
    found = {metric.exactness for metric in metrics}
    return found.pop() if len(found) == 1 else "exactness by row"


def _figures(metrics: Sequence[MetricSummary], documents: int, floor: float | None) -> Table:
    table = new_table(header=False)
    table.add_column(min_width=28, overflow="fold")
    table.add_column(min_width=14, justify="right", overflow="fold")
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True)
    mixed = len({metric.exactness for metric in metrics}) > 1
    for metric in metrics:
        for name in ordered(metric):
            figure = metric.statistics[name]
            text = figure_text(figure.value, figure.interval, unit=metric.unit, documents=documents)
            interval = "" if name in ("max", "min", "sampling_se") else text.interval
            noise = NOISE_MARK if is_noise(metric, name, floor) else ""
            mark = f"{noise} {metric.exactness if mixed else ''}".strip()
            table.add_row(*map(safe, (label(metric, name), text.value, interval, mark)))
            if metric.metric == "kl" and name == "mean" and floor is not None:
                table.add_row(safe("  above the noise floor"), safe(plain(max(0.0, figure.value - floor))))
        if metric.exactness == "bounded" and "mean_low" in metric.statistics and "mean_high" not in metric.statistics:
            table.add_row(safe(f"{label(metric, 'mean_low').rsplit(',')[0]}, upper bound"), safe("none known"))
    return table


def _layers(source: Source) -> Table:
    """What each kind of layer is made of."""
    table = new_table(header=True)
    table.add_column("", min_width=16, overflow="fold")
    for name in ("layers", "bytes", "bits/weight"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("weights", overflow="fold")
    table.add_column("activations", overflow="fold")
    for row in source.layers:
        bits = "-" if row.bits is None else f"{row.bits:.2f}"
        scheme = f"{row.scheme}, dequantized" if row.dequantized else row.scheme
        table.add_row(*map(safe, (row.kind, f"{row.layers:,}", sized(row.bytes), bits, scheme, row.activations or "-")))
    return table


def _noise(group: Group, noise: Noise) -> Table:
    """Floor and excess of the figures that have one."""
    table = new_table(header=True)
    table.add_column("", min_width=28, overflow="fold")
    for heading in ("floor", "excess"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("", overflow="fold")
    for row in noise_rows(group, noise):
        table.add_row(*map(safe, row))
    return table


def _side_by_side(kind: str, noun: str, groups: Sequence[tuple[str, Group]]) -> Table:
    """One row per candidate or domain with the headline figures, the interval below each value."""
    headlines = [h for h in HEADLINES[kind] if any(_headline(group, h[0], h[1]) for _, group in groups)]
    table = new_table(header=True)
    table.add_column(safe(noun), overflow="fold")
    table.add_column("docs", justify="right", no_wrap=True)
    for _, _, heading in headlines:
        table.add_column(heading, justify="right", overflow="fold")
    for name, group in groups:
        cells = [_headline(group, metric, statistic) for metric, statistic, _ in headlines]
        table.add_row(safe(name), safe(f"{group.documents:,}"), *(_stacked(cell) for cell in cells))
    return table


def _headline(group: Group, name: str, statistic: str) -> FigureText | None:
    """A figure of the group; where only bounds are known its lower bound, marked as one."""
    metric = group.metrics.get(name)
    if metric is None:
        return None
    figure, bound = metric.statistics.get(statistic), metric.statistics.get(f"{statistic}_low")
    shown = figure or bound
    if shown is None:
        return None
    text = figure_text(shown.value, shown.interval, unit=metric.unit, documents=group.documents)
    return text if figure is not None else text._replace(value=f">= {text.value}")


def _stacked(cell: FigureText | None) -> Text:
    return block("-" if cell is None else "\n".join(part for part in cell if part))


REPORT = Report("summary", render, terminal=True)
