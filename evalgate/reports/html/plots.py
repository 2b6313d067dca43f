"""The plots of a report: each a drawing, the sentence that says how to read it, and its data as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from evalgate.core import Figure, counted
from evalgate.metrics import get
from evalgate.reports._numbers import PERCENT_UNITS, figure_text
from evalgate.reports._svg import Band, Chart, Linear, Log, Mark, Scale, SignedLog, Span, number
from evalgate.reports._words import METRICS
from evalgate.reports.html.subjects import Floor, Subject
from evalgate.stats.series import (
    Calibration,
    Distribution,
    Part,
    Profile,
    cuts_of,
    delta_p_distribution,
    distribution,
    entropy_calibration,
    probability_calibration,
    profile,
    running,
    worst_documents,
)

if TYPE_CHECKING:
    from markupsafe import Markup

    from evalgate.stats.slices import By

WIDE = 20.0  # values that differ by a larger factor are drawn on a logarithmic axis
FURTHEST = 1e-4  # of the least value: a noise floor below it does not stretch a logarithmic axis
MOST_PARTS = 12  # rows of a plot by name; the table has more
MOST_ROWS = 300  # of a table under a plot
SETTLED = 5  # documents from which the running interval is drawn: that of fewer would hide everything else
FEW = 2  # candidates that a plot's text speaks of one by one; beyond them the table does


@dataclass(frozen=True)
class Table:
    """Data as text: headings, rows, and how many columns at the left are names."""

    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]
    names: int = 1

    @property
    def shown(self) -> list[tuple[str, ...]]:
        """The rows that the page has."""
        return self.rows[:MOST_ROWS]


@dataclass(frozen=True)
class Plot:
    """One figure of the page. name: its id. legend: (series, name, kind of swatch), beside the page's of candidates."""

    name: str
    title: str
    text: str
    svg: Markup
    table: Table
    legend: list[tuple[int, str, str]] = field(default_factory=list)


def plots(subjects: Sequence[Subject], floor: Floor, token_texts: Mapping[int, str] | None) -> list[Plot]:
    """Every plot that the candidates' columns allow, in the order of the page."""
    if not subjects:
        return []
    metric = subjects[0].metric
    makers: list[Callable[[], Plot | None]] = [
        lambda: _distribution(subjects, floor),
        lambda: _running(subjects, floor),
        lambda: _by_name(subjects, "domain", floor),
        lambda: _by_name(subjects, "token", floor, token_texts),
        lambda: _by_range(subjects, "entropy", floor),
        lambda: _by_range(subjects, "position", floor),
        lambda: _by_name(subjects, "document", floor),
        lambda: _delta_p(subjects),
        lambda: _probability(subjects),
        lambda: _entropy(subjects),
    ]
    if metric == "top1_agreement":
        makers = makers[1:]  # a share has no distribution
    return [plot for make in makers if (plot := make()) is not None]


# The distribution


def _distribution(subjects: Sequence[Subject], floor: Floor) -> Plot | None:
    found = [(s, distribution(s.scores, s.metric)) for s in subjects if s.ends]
    found = [(s, one) for s, one in found if one.bins]
    if not found:
        return None
    word = _word(found[0][0])
    edges = [e for _, one in found for e in (one.bins[0].low, one.bins[-1].high)]
    x = Log.over([*edges, *_in_reach(floor, min(edges), subjects)])
    y = Linear.over([b.share for _, one in found for b in one.bins] + _masses(found), percent=True, most=5)
    chart = Chart(x, y, x_label=f"{word}, nats (log scale)", y_label="share of positions")
    legend: list[tuple[int, str, str]] = []
    if len(found) == 1:
        (subject, one) = found[0]
        chart.bars([(b.low, b.high, b.share, _bin_said(b.low, b.high, b.count, b.share)) for b in one.bins])
        if all(b.mass is not None for b in one.bins):
            chart.steps([(b.low, b.high, b.mass or 0.0) for b in one.bins], series=1, kind="thin")
            legend = [(0, "share of positions", "bar"), (1, f"share of the total {word}", "line")]
        for row, (name, statistic) in enumerate((("mean", "mean"), ("median", "median"), ("99 %", "p99"))):
            figure = _statistic(subject, statistic)
            if figure is not None and figure > 0:
                chart.tag_x(figure, name, row=row)
    else:
        for subject, one in found:
            bins = [(b.low, b.high, b.share) for b in one.bins]
            chart.steps(bins, series=subject.place, kind="" if subject.place < 6 else "dashed")
    _draw_floor(chart.floor_x, floor, subjects)
    return Plot(
        "distribution",
        f"How large {word} is",
        _distribution_text(found, word) + _floor_text(floor, subjects),
        chart.svg("plot-distribution", f"Distribution of {word}", _distribution_text(found, word)),
        Table(
            (*_candidate_heading(subjects), "from", "to", "positions", "share", f"share of total {word}"),
            [
                (
                    *_candidate_cell(subjects, s),
                    number(b.low),
                    number(b.high),
                    f"{b.count:,}",
                    _percent(b.share),
                    _percent(b.mass),
                )
                for s, one in found
                for b in one.bins
                if b.count
            ],
            names=len(_candidate_heading(subjects)),
        ),
        legend,
    )


def _masses(found: Sequence[tuple[Subject, Distribution]]) -> list[float]:
    return [b.mass for _, one in found for b in one.bins if b.mass is not None] if len(found) == 1 else []


def _distribution_text(found: Sequence[tuple[Subject, Distribution]], word: str) -> str:
    parts = []
    for subject, one in found:
        name = f" of {subject.name}" if len(found) > 1 else ""
        if len(found) > FEW:
            continue
        if one.half is not None:
            parts.append(f"The worst {_percent(one.half)} of positions hold half of the total {word}{name}.")
        if one.below:
            parts.append(f"{_percent(one.below / one.n)} of positions{name} lie at or below 10⁻⁹ and are not drawn.")
    if any(one.series == "low" for _, one in found):
        parts.append("These are lower bounds: the truth at a position may be larger.")
    return " ".join(parts) or "How many positions lie where."


def _bin_said(low: float, high: float, n: int, share: float) -> str:
    return f"{number(low)} to {number(high)}: {counted(n, 'position')}, {_percent(share)}"


# As documents arrive


def _running(subjects: Sequence[Subject], floor: Floor) -> Plot | None:
    found = [(s, running(s.scores, s.metric)) for s in subjects if s.ends]
    if not found or all(len(one.points) < 2 for _, one in found):
        return None
    word, per = _word(found[0][0]), found[0][1].per
    last = max(one.points[-1].arrived for _, one in found)
    x: Scale = Log(1.0, float(last)) if last > 30 else Linear(1.0, float(max(last, 2)), most=8)
    percent = get(found[0][0].metric).unit in PERCENT_UNITS
    ends = [e for _, one in found for p in one.points if p.arrived >= SETTLED for e in _reach(p.figure)]
    ends += [p.figure.known for _, one in found for p in one.points]
    y = _value_axis(ends, floor, subjects, percent=percent)
    chart = Chart(x, y, x_label=f"{per} measured", y_label=_mean(word))
    for subject, one in found:
        chart.area(
            [
                (float(p.arrived), Span(p.figure.low, p.figure.high))
                for p in one.points
                if p.figure.interval.known and p.arrived >= SETTLED
            ],
            series=subject.place,
        )
    for subject, one in found:
        chart.line([(float(p.arrived), p.figure.known) for p in one.points], series=subject.place)
    _draw_floor(chart.floor_y, floor, subjects)
    confidence = found[0][1].points[-1].figure.interval.confidence
    text = (
        f"The mean over the first {per}, in the order in which they were measured, with its {_level(confidence)} "
        f"interval from {SETTLED} {per} on: has the figure settled? Each interval is for one size; they do not hold "
        "together."
    )
    unit = get(found[0][0].metric).unit
    return Plot(
        "running",
        f"The estimate as {per} arrive",
        text + _floor_text(floor, subjects),
        chart.svg("plot-running", f"{_mean(word)} as {per} arrive", text),
        Table(
            (*_candidate_heading(subjects), per, "positions", _mean(word), "interval"),
            [
                (*_candidate_cell(subjects, s), f"{p.arrived:,}", f"{p.figure.n:,}", *_figure_cells(p.figure, unit))
                for s, one in found
                for p in one.points
            ],
            names=len(_candidate_heading(subjects)),
        ),
    )


# By part


_CUTS: dict[str, tuple[str, str, str]] = {
    "domain": ("By domain", "Where the text comes from.", "domain"),
    "token": ("By class of token", "What the actual token is.", "class"),
    "document": ("The worst documents", "Each from its own positions alone.", "document"),
    "entropy": (
        "By the reference's entropy",
        "How open the next token was: near 0 the reference was sure, above 4 nats it was guessing.",
        "entropy of the reference, nats",
    ),
    "position": ("By position in the window", "How much text the models had seen.", "tokens seen before"),
}


def _cut(by: str, subjects: Sequence[Subject]) -> tuple[str, str, str]:
    """Title, text and heading of a cut; a model that is measured alone has no reference."""
    title, text, heading = _CUTS[by]
    if by == "entropy" and not all(s.scores.has("ref_entropy") for s in subjects):
        return "By the model's entropy", text.replace("the reference", "the model"), "entropy of the model, nats"
    return title, text, heading


def _profiles(
    subjects: Sequence[Subject], by: By, token_texts: Mapping[int, str] | None = None
) -> list[tuple[Subject, Profile]]:
    """One profile a candidate, of its values or its lower bounds."""
    return [
        (s, _profile(s, by, None, token_texts)) for s in subjects if s.ends and by in cuts_of(s.scores, token_texts)
    ]


def _profile(subject: Subject, by: By, series: str | None, token_texts: Mapping[int, str] | None) -> Profile:
    if by == "document":
        return worst_documents(subject.scores, subject.metric, series=series, most=MOST_ROWS)
    return profile(subject.scores, by, subject.metric, series=series, token_texts=token_texts)


def _uppers(
    found: Sequence[tuple[Subject, Profile]], by: By, token_texts: Mapping[int, str] | None = None
) -> dict[tuple[int, str], Figure]:
    """Means of the upper bounds by candidate and part, where both bounds are known."""
    return {
        (s.place, part.name): part.figure
        for s, one in found
        if one.series == "low" and "high" in s.ends
        for part in _profile(s, by, "high", token_texts).parts
    }


def _outer(figure: Figure, upper: Figure | None) -> Span | None:
    """From the lower bound's interval to the upper bound's."""
    if upper is None:
        return _span(figure)
    low = figure.low if figure.interval.known else figure.value
    return Span(low, upper.high if upper.interval.known else upper.value)


def _by_name(
    subjects: Sequence[Subject], by: By, floor: Floor, token_texts: Mapping[int, str] | None = None
) -> Plot | None:
    found = _profiles(subjects, by, token_texts)
    totals: dict[str, float] = {}
    for _, one in found:
        for part in one.parts:
            totals[part.name] = max(totals.get(part.name, 0.0), part.figure.known)
    if len(totals) < 2:
        return None
    higher = get(found[0][0].metric).better == "higher"
    names = sorted(totals, key=lambda name: totals[name], reverse=not higher)
    drawn = names[:MOST_PARTS]
    percent = found[0][1].unit in PERCENT_UNITS
    uppers = _uppers(found, by, token_texts)
    ends = [e for _, one in found for p in one.parts if p.name in drawn for e in _reach(p.figure)]
    ends += [e for (_, name), upper in uppers.items() if name in drawn for e in _reach(upper)]
    x = _value_axis(ends, floor, subjects, percent=percent)
    word = _word(found[0][0])
    row = max(26, 9 * len(found) + 12)
    chart = Chart(x, Band(tuple(drawn)), x_label=_mean(word), height=62 + row * len(drawn))
    for slot, (subject, one) in enumerate(found):
        shift = (slot - (len(found) - 1) / 2) * 9
        chart.marks(
            [
                Mark(
                    part.figure.known,
                    float(drawn.index(part.name)),
                    across=_outer(part.figure, uppers.get((subject.place, part.name))),
                    said=_part_said(subject, part, one.unit),
                    hollow=not part.figure.interval.known,
                    pointing="right" if one.series == "low" and not uppers else "",
                    shift=shift,
                )
                for part in one.parts
                if part.name in drawn
            ],
            series=subject.place,
        )
    _draw_floor(chart.floor_x, floor, subjects)
    return _part_plot(subjects, by, found, chart, floor, left=len(names) - len(drawn))


def _by_range(subjects: Sequence[Subject], by: By, floor: Floor) -> Plot | None:
    found = _profiles(subjects, by)
    order: dict[str, float] = {}
    for _, one in found:
        for part in one.parts:
            order[part.name] = part.low or 0.0
    if len(order) < 2:
        return None
    names = sorted(order, key=lambda name: order[name])
    labels = tuple(_range_label(name) for name in names)
    percent = found[0][1].unit in PERCENT_UNITS
    uppers = _uppers(found, by)
    ends = [e for p in [p for _, one in found for p in one.parts] for e in _reach(p.figure)]
    ends += [e for upper in uppers.values() for e in _reach(upper)]
    y = _value_axis(ends, floor, subjects, percent=percent)
    word = _word(found[0][0])
    chart = Chart(Band(labels), y, x_label=_cut(by, subjects)[2], y_label=_mean(word))
    for slot, (subject, one) in enumerate(found):
        places = [(float(names.index(part.name)), part) for part in one.parts]
        shift = (slot - (len(found) - 1) / 2) * 7
        if len(found) == 1:
            chart.line([(x, part.figure.known) for x, part in places], series=subject.place, kind="thin")
        chart.marks(
            [
                Mark(
                    x,
                    part.figure.known,
                    along=_outer(part.figure, uppers.get((subject.place, part.name))),
                    said=_part_said(subject, part, one.unit),
                    hollow=not part.figure.interval.known,
                    pointing="up" if one.series == "low" and not uppers else "",
                    shift=shift,
                )
                for x, part in places
            ],
            series=subject.place,
        )
    _draw_floor(chart.floor_y, floor, subjects)
    return _part_plot(subjects, by, found, chart, floor)


def _part_plot(
    subjects: Sequence[Subject],
    by: str,
    found: Sequence[tuple[Subject, Profile]],
    chart: Chart,
    floor: Floor,
    *,
    left: int = 0,
) -> Plot:
    title, text, heading = _cut(by, subjects)
    word, one = _word(found[0][0]), found[0][1]
    text += f" Dots are means; bars are intervals that hold together at {_level(one.confidence)}."
    if any(not p.figure.interval.known for _, each in found for p in each.parts):
        text += " A hollow dot comes from one document and has no interval."
    if one.series == "low":
        both = all("high" in s.ends for s, _ in found)
        text += " The means are of lower bounds" + (
            "; bars reach to the upper ones." if both else "; there are no upper ones."
        )
    if left:
        text += f" {left:,} more are in the table."
    spoken = f"{text} {_extremes(found, word)}"
    return Plot(
        by,
        title,
        text + _floor_text(floor, subjects),
        chart.svg(f"plot-{by}", f"{_mean(word)}: {title.lower()}", spoken),
        Table(
            (
                *_candidate_heading(subjects),
                heading,
                "positions",
                "documents",
                _mean(word),
                "interval",
                "share of total",
            ),
            [
                (
                    *_candidate_cell(subjects, s),
                    part.name,
                    f"{part.figure.n:,}",
                    f"{part.documents:,}",
                    *_figure_cells(part.figure, each.unit),
                    _percent(part.share),
                )
                for s, each in found
                for part in each.parts
            ],
            names=len(_candidate_heading(subjects)) + 1,
        ),
    )


def _extremes(found: Sequence[tuple[Subject, Profile]], word: str) -> str:
    said = []
    for subject, one in found:
        ordered = sorted(one.parts, key=lambda part: part.figure.known)
        low, high = ordered[0], ordered[-1]
        least, most = _value(low.figure, one.unit), _value(high.figure, one.unit)
        said.append(f"{subject.name}: from {least} in {low.name} to {most} in {high.name}.")
    return f"{_mean(word)}. " + " ".join(said)


def _part_said(subject: Subject, part: Part, unit: str) -> str:
    value, interval = _figure_cells(part.figure, unit)
    return f"{subject.name}, {part.name}: {value} {interval}, {counted(part.figure.n, 'position')}"


def _range_label(name: str) -> str:
    return name.replace(" nats", "").replace("over ", "> ").replace("-", "–")


# Probabilities


def _delta_p(subjects: Sequence[Subject]) -> Plot | None:
    found = [(s, delta_p_distribution(s.scores)) for s in subjects if _has(s, "ref_nll", "cand_nll")]
    if not found:
        return None
    x = SignedLog(1e-4, 1.0)
    y = Linear.over([b.share for _, one in found for b in one.bins], percent=True, most=5)
    chart = Chart(x, y, x_label="change of the actual token's probability", y_label="share of positions")
    for subject, one in found:
        if len(found) == 1:
            chart.bars([(b.low, b.high, b.share, _bin_said(b.low, b.high, b.count, b.share)) for b in one.bins])
        else:
            chart.steps([(b.low, b.high, b.share) for b in one.bins], series=subject.place)
    said = []
    for subject, one in found if len(found) <= FEW else ():
        name = f"{subject.name}: " if len(found) > 1 else ""
        down = sum(b.share for b in one.bins if b.high <= -0.1 + 1e-12)
        up = sum(b.share for b in one.bins if b.low >= 0.1 - 1e-12)
        said.append(f"{name}{_percent(down)} of positions lose 0.1 or more, {_percent(up)} gain as much.")
    text = (
        "What the candidate gives the actual token, less what the reference gave it. As much to the left as to the "
        "right is noise; more to the left is loss. " + " ".join(said)
    )
    return Plot(
        "delta-p",
        "Change of the token's probability",
        text,
        chart.svg("plot-delta-p", "Distribution of the change of the actual token's probability", text),
        Table(
            (*_candidate_heading(subjects), "from", "to", "positions", "share"),
            [
                (*_candidate_cell(subjects, s), number(b.low), number(b.high), f"{b.count:,}", _percent(b.share))
                for s, one in found
                for b in one.bins
                if b.count
            ],
            names=len(_candidate_heading(subjects)),
        ),
    )


def _probability(subjects: Sequence[Subject]) -> Plot | None:
    found = [(s, probability_calibration(s.scores)) for s in subjects if _complete(s, "ref_nll", "cand_nll")]
    if not found:
        return None
    axis = Linear(0.0, 1.0, most=5)
    chart = Chart(
        axis,
        axis,
        x_label="reference's probability of the actual token",
        y_label="candidate's, on average",
    )
    chart.diagonal("as sure as the reference")
    text = (
        "Positions are put together by how likely the reference found the actual token. Below the diagonal the "
        "candidate is less sure of the text than the reference, above it more."
    )
    return _calibration_plot("probability", "Candidate against reference", text, chart, subjects, found)


def _entropy(subjects: Sequence[Subject]) -> Plot | None:
    found = [
        (s, entropy_calibration(s.scores, "candidate")) for s in subjects if _complete(s, "cand_entropy", "cand_nll")
    ]
    if not found:
        return None
    reference = next((s for s, _ in found if _complete(s, "ref_entropy", "ref_nll")), None)
    baseline = entropy_calibration(reference.scores, "reference") if reference else None
    every = [one for _, one in found] + ([baseline] if baseline else [])
    ends = [e for one in every for b in one.bins for e in (b.stated, *_reach(b.actual))]
    axis = Linear.over(ends, most=6)
    chart = Chart(axis, axis, x_label="entropy that the model states, nats", y_label="what the text costs it, nats")
    chart.diagonal("calibrated")
    if baseline is not None:
        chart.line([(b.stated, b.actual.known) for b in baseline.bins], series=5, kind="dashed")
    text = (
        "A calibrated model pays for the text, on average, the entropy that it states. Above the diagonal it is surer "
        "than it may be, below it less sure."
    )
    plot = _calibration_plot("calibration", "Calibration", text, chart, subjects, found)
    if baseline is None:
        return plot
    rows = [
        (*(("reference",) if len(subjects) > 1 else ()), *_calibration_cells(b.low, b.high, b.stated, b.actual, "nats"))
        for b in baseline.bins
    ]
    legend = [*([(0, "candidate", "mark")] if len(subjects) == 1 else []), (5, "reference", "dashed")]
    table = Table(plot.table.headings, [*plot.table.rows, *rows], plot.table.names)
    if len(subjects) == 1:
        table = Table(
            ("side", *plot.table.headings),
            [("candidate", *r) for r in plot.table.rows] + [("reference", *r) for r in rows],
        )
    return Plot(plot.name, plot.title, plot.text, plot.svg, table, legend)


def _calibration_plot(
    name: str,
    title: str,
    text: str,
    chart: Chart,
    subjects: Sequence[Subject],
    found: Sequence[tuple[Subject, Calibration]],
) -> Plot:
    for subject, one in found:
        chart.line([(b.stated, b.actual.known) for b in one.bins], series=subject.place, kind="thin")
        chart.marks(
            [
                Mark(
                    b.stated,
                    b.actual.known,
                    along=_span(b.actual),
                    said=f"{subject.name}: {number(b.stated)} stated, {number(b.actual.known)} actual",
                    hollow=not b.actual.interval.known,
                )
                for b in one.bins
            ],
            series=subject.place,
        )
    said = []
    for subject, one in found if len(found) <= FEW else ():
        lead = f"{subject.name}: mean" if len(found) > 1 else "Mean"
        value, interval = _figure_cells(one.gap, "")
        said.append(f"{lead} difference {value} {interval}".strip() + ".")
    first = found[0][1]
    return Plot(
        name,
        title,
        f"{text} {' '.join(said)}",
        chart.svg(f"plot-{name}", title, f"{text} {' '.join(said)}"),
        Table(
            (
                *_candidate_heading(subjects),
                "from",
                "to",
                f"mean {first.stated}",
                f"mean {first.actual}",
                "interval",
                "positions",
            ),
            [
                (*_candidate_cell(subjects, s), *_calibration_cells(b.low, b.high, b.stated, b.actual, one.unit))
                for s, one in found
                for b in one.bins
            ],
            names=len(_candidate_heading(subjects)),
        ),
    )


def _calibration_cells(low: float, high: float, stated: float, actual: Figure, unit: str) -> tuple[str, ...]:
    value, interval = _figure_cells(actual, unit if unit == "nats" else "")
    return number(low), number(high), number(stated), value, interval, f"{actual.n:,}"


# Shared


def _value_axis(ends: Iterable[float], floor: Floor, subjects: Sequence[Subject], *, percent: bool) -> Scale:
    """From 0 where values are of one size, logarithmic where they are not; shares from near the least one."""
    values = list(ends)
    above = sorted(v for v in values if v > 0)
    if percent:
        return Linear.over(values, zero=False, percent=True)
    means = above or [1.0]
    if len(means) > 3 and means[-1] / means[len(means) // 4] > WIDE:
        # An interval may reach down to 0, which a logarithmic axis does not have.
        least = means[len(means) // 4] / 100
        return Log.over([max(v, least) for v in above] + _in_reach(floor, means[0], subjects))
    return Linear.over(values)


def _in_reach(floor: Floor, least: float, subjects: Sequence[Subject]) -> list[float]:
    """The floor, where an axis that begins at `least` may be stretched to it."""
    known = floor.value if subjects[0].metric == "kl" else None
    return [known] if known and known > least * FURTHEST else []


def _draw_floor(draw: Callable[[float, str], None], floor: Floor, subjects: Sequence[Subject]) -> None:
    if subjects[0].metric == "kl" and floor.value is not None:
        draw(floor.value, floor.label)


def _floor_text(floor: Floor, subjects: Sequence[Subject]) -> str:
    if subjects[0].metric != "kl":
        return ""
    if floor.value is None:
        return " The noise floor was not measured."
    return f" Dashed: the noise floor, {floor.source}."


def _word(subject: Subject) -> str:
    """What the metric is called on an axis."""
    word = {"kl": "KL", "nll": "NLL", "top1_agreement": "share of same top-1"}.get(
        subject.metric, METRICS.get(subject.metric, subject.metric)
    )
    return f"{word} (lower bound)" if subject.exactness == "bounded" else word


def _candidate_heading(subjects: Sequence[Subject]) -> tuple[str, ...]:
    return ("candidate",) if len(subjects) > 1 else ()


def _candidate_cell(subjects: Sequence[Subject], subject: Subject) -> tuple[str, ...]:
    return (subject.name,) if len(subjects) > 1 else ()


def _statistic(subject: Subject, name: str) -> float | None:
    metric = subject.comparison.overall.metrics.get(subject.metric)
    figure = None if metric is None else metric.statistics.get(name)
    return None if figure is None else figure.value


def _reach(figure: Figure) -> list[float]:
    """The value and the ends of its interval that are known."""
    return [v for v in (figure.value, figure.low, figure.high) if v is not None]


def _span(figure: Figure) -> Span | None:
    return Span(figure.low, figure.high) if figure.interval.known else None


def _figure_cells(figure: Figure, unit: str) -> tuple[str, str]:
    text = figure_text(figure.known, figure.interval, unit=unit, documents=figure.documents)
    return text.value, text.interval


def _mean(word: str) -> str:
    """What an axis of means is called; a share is a mean already."""
    return word if word.startswith("share") else f"mean {word}"


def _level(confidence: float) -> str:
    return f"{confidence * 100:g} %"


def _value(figure: Figure, unit: str) -> str:
    return _figure_cells(figure, unit)[0]


def _percent(share: float | None) -> str:
    if share is None:
        return "–"
    return f"{share * 100:.1f} %" if share >= 0.1 else f"{number(share * 100, 2)} %"


def _has(subject: Subject, *columns: str) -> bool:
    return all(subject.scores.form(name) == "exact" for name in columns) and _complete(subject, *columns)


def _complete(subject: Subject, *columns: str) -> bool:
    return all(subject.scores.complete(name) for name in columns)
