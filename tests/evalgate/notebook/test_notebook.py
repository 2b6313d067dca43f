"""A run in a notebook: what it shows of itself, and its plots, which draw the data of `evalgate.stats.series`."""

from __future__ import annotations

import sys
from dataclasses import replace
from html import escape
from html.parser import HTMLParser

import numpy as np
import pytest

import evalgate
from evalgate.errors import UsageError
from evalgate.metrics import split_candidates
from evalgate.notebook import Plots, ShownRun
from evalgate.reports._headline import headline
from evalgate.stats import series
from evalgate.stats.summarize import summarize
from evalgate.store.runs import Run, write_run
from evalgate.summary import Comparison
from evalgate.table import column
from tests.evalgate.sample_run import source, summary, token_table

go = pytest.importorskip("plotly.graph_objects", reason="needs the extra 'notebook'")
CANDIDATES = ("demo@int8", "demo@bf16")
TEXTS = {token: ("the", " x_1", "12", "\n", ".")[token % 5] for token in range(1000)}


def shown(table=None, *, texts=TEXTS, kind="kl", **changes) -> ShownRun:
    table = token_table(CANDIDATES, documents=12) if table is None else table
    reference = None if kind == "ppl" else source("demo", kl_floor=1e-4)
    return ShownRun.of(Run(summary(table, kind=kind, reference=reference, **changes), table, {}, None, texts))


@pytest.fixture(scope="module")
def run() -> ShownRun:
    return shown()


def scores(run: ShownRun, place: int = 0):
    return list(split_candidates(run.table, noise_floor=run.summary.reference.noise_floor))[place]


def traces(figure, name: str):
    return [trace for trace in figure.data if str(trace.name).startswith(name)]


@pytest.mark.parametrize("name", [name for name in Plots.names() if name != "distribution"])
def test_every_plot_is_a_figure_of_every_candidate_that_names_its_axes(run: ShownRun, name: str) -> None:
    figure = getattr(run.plot, name)()
    assert isinstance(figure, go.Figure)
    for candidate in CANDIDATES:
        (trace,) = traces(figure, candidate)
        assert len(trace.x) == len(trace.y) > 0
    assert figure.layout.xaxis.title.text and figure.layout.yaxis.title.text and figure.layout.title.text
    assert figure.to_json()
    one = getattr(run.plot, name)(candidate="demo@bf16")
    assert len(traces(one, "demo@bf16")) == 1 and not traces(one, "demo@int8")


@pytest.mark.parametrize(
    ("name", "by"), [("position", "position"), ("entropy", "entropy"), ("domain", "domain"), ("class", "token")]
)
def test_a_plot_by_part_draws_what_slices_says(run: ShownRun, name: str, by) -> None:
    (trace,) = traces(getattr(run.plot, f"by_{name}")(), "demo@int8")
    wanted = series.profile(scores(run), by, "kl", token_texts=TEXTS)
    assert list(trace.x) == [part.name for part in wanted.parts]
    assert list(trace.y) == [part.figure.value for part in wanted.parts]
    above = [0.0 if p.figure.high is None else p.figure.high - p.figure.value for p in wanted.parts]
    assert list(trace.error_y.array) == pytest.approx(above)


def test_the_distribution_holds_every_position_and_the_summarys_mean(run: ShownRun) -> None:
    figure = run.plot.kl("demo@int8")
    (trace,) = traces(figure, "demo@int8")
    assert sum(trace.y[::2]) == pytest.approx(1.0)
    mean = run.summary.comparisons[0].overall.metrics["kl"].statistics["mean"].value
    lines = [shape.x0 for shape in figure.layout.shapes]
    assert mean in lines and 1e-4 in lines
    assert traces(figure, "noise floor 0.0001, seen when the models were loaded")


def test_the_running_mean_ends_at_the_summarys_figure(run: ShownRun) -> None:
    (trace,) = traces(run.plot.running(candidate="demo@int8"), "demo@int8")
    figure = run.summary.comparisons[0].overall.metrics["kl"].statistics["mean"]
    assert trace.x[-1] == 12 and trace.y[-1] == pytest.approx(figure.value)
    assert f"{figure.low:.4f}" in trace.text[-1]


def test_calibration_shows_the_reference_once_and_the_diagonal(run: ShownRun) -> None:
    figure = run.plot.calibration()
    assert len(traces(figure, "reference")) == len(traces(figure, "as sure as right")) == 1
    (trace,) = traces(run.plot.calibration("probability", "demo@int8"), "demo@int8")
    assert list(trace.x) == [b.stated for b in series.probability_calibration(scores(run)).bins]
    with pytest.raises(UsageError, match="choose entropy or probability"):
        run.plot.calibration("nope")


def test_intervals_have_the_runs_confidence() -> None:
    table = token_table(("a",), documents=12)
    ((_, overall, domains),) = summarize(table, kind="kl", noise_floor=1e-6, confidence=0.8)
    run = shown(table, comparisons=[Comparison(candidate=source("a"), overall=overall, domains=list(domains))])
    assert "80 % intervals" in run.plot.by_domain().layout.title.subtitle.text


def test_bounds_are_drawn_as_bounds_and_say_so() -> None:
    table = token_table(("a",), documents=6)
    tv = table.column("tv").to_numpy()
    for name in ("tv", "kl"):
        table = table.drop_columns([name]).append_column(f"{name}_low", column(f"{name}_low", tv / 2))
    run = shown(table.append_column("tv_high", column("tv_high", tv)))
    assert [trace.name for trace in run.plot.by_domain("tv").data][:2] == ["a, lower bound", "a, upper bound"]
    assert run.plot.by_position("kl").data[0].name == "a, lower bound"
    assert "a, lower bound" in run.plot.kl().data[0].name
    assert "at least" in run._repr_html_() and "bounded" in run._repr_html_()


def test_one_document_has_points_without_intervals() -> None:
    run = shown(token_table(("a",), documents=1))
    (trace,) = traces(run.plot.by_domain(), "a")
    assert list(trace.error_y.array) == [0.0] and "unknown" in trace.text[0]
    assert len(run.plot.running().data) >= 1
    assert "unknown (1 document)" in run._repr_html_()


def test_a_perplexity_run_has_the_plots_of_its_columns() -> None:
    run = shown(token_table(("a", "b"), documents=6, pair=False), kind="ppl")
    assert len(traces(run.plot.running("nll"), "a")) == 1
    assert not traces(run.plot.calibration(), "reference")
    with pytest.raises(UsageError, match="no scores for kl"):
        run.plot.kl()
    assert "perplexity" in run._repr_html_()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: p.kl("nope"), "there is no candidate 'nope' in this run: choose one of demo@int8, demo@bf16"),
        (lambda p: p.by_domain("nope"), "there is no metric 'nope'"),
        (lambda p: p.distribution("delta_prob"), "both signs"),
        (lambda p: p.by_position("greedy_match_length"), "one value per window"),
    ],
)
def test_what_cannot_be_drawn_is_said(run: ShownRun, make, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make(run.plot)


def test_what_a_run_does_not_hold_is_not_plotted() -> None:
    with pytest.raises(UsageError, match="does not hold the texts of all its tokens: choose one of by_domain, by_pos"):
        shown(texts=None).plot.by_class()
    table = token_table(("a",), documents=3).drop_columns(["ref_entropy", "cand_entropy"])
    with pytest.raises(UsageError, match="does not hold the reference's entropies: choose one of by_domain, by_pos"):
        shown(table).plot.by_entropy()


def test_without_plotly_the_sentence_says_what_to_install(run: ShownRun, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(UsageError, match=r"pip install 'evalgate-lm\[notebook\]'"):
        run.plot.kl()
    assert run._repr_html_()


class _Elements(HTMLParser):
    """Every element, and that each is closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


def test_a_notebook_shows_the_headline_figures(run: ShownRun) -> None:
    text = run._repr_html_()
    elements = _Elements(text)
    assert elements.open == [] and set(elements.tags) >= {"table", "th", "td"}
    kl = run.summary.comparisons[0].overall.metrics["kl"].statistics["mean"]
    assert f"{kl.value:.4f}" in text and f"[{kl.low:.4f}" in text
    assert text.count("<tr>") == 3 and "a note that a reader must know" in text
    for comparison in run.summary.comparisons:
        assert escape(headline(run.summary, comparison)) in text


def test_names_cannot_become_markup_or_move_a_cursor() -> None:
    run = shown(token_table(("<img src=x onerror=alert(1)>\x1b[2J\u202e",), documents=3))
    text = run._repr_html_() + run.plot.by_domain().to_json() + run.plot.kl().to_json()
    assert "<img" not in text and "\\u003cimg" not in text.lower()
    assert not any(character in run._repr_html_() for character in "\x1b\u202e")


def test_many_candidates_are_cut_and_counted() -> None:
    table = token_table(("a",), documents=3)
    made = summary(table, reference=source("demo"))
    run = ShownRun.of(Run(made.model_copy(update={"comparisons": made.comparisons * 60}), table, {}, None, None))
    text = run._repr_html_()
    assert "and 10 more candidates" in text and text.count("<tr>") == 51


def test_the_api_returns_runs_that_show_themselves(tmp_path) -> None:
    table = token_table(("a",), documents=3)
    write_run(tmp_path / "run", manifest={}, table=table, summary=summary(table, reference=source("demo")))
    run = evalgate.load(tmp_path / "run")
    assert isinstance(run, ShownRun) and isinstance(run, Run)
    assert repr(run).startswith("Run: kl of a against demo")
    assert np.isclose(
        run.tokens["kl"].mean(), run.summary.comparisons[0].overall.metrics["kl"].statistics["mean"].value
    )
    assert isinstance(replace(run, folder=None), ShownRun)
