"""Markdown for a model card, CSV for a spreadsheet: the summary's figures, whatever names are in them."""

import csv
import io
import re

import pytest

from evalgate.printable import printable
from evalgate.reports import get
from evalgate.reports._headline import headline
from evalgate.summary import Place, Ranking
from tests.evalgate.sample_run import source, summary, token_table

HOSTILE = ["a|b", "`x`", "``", "<img src=x>", "@team", "=1+1", "*bold*", "[a](b)", "new\nline", "::error::x", "\u202ex"]


def markdown(document):
    return get("summary", "markdown").text(document)


def rows(document):
    return list(csv.DictReader(io.StringIO(get("summary", "csv").text(document))))


def tables(text):
    """The Markdown tables as lists of rows of cells."""
    found = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    return [[[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table] for table in found]


def test_markdown_opens_with_the_sentence_and_has_a_row_per_candidate_and_domain(document):
    text = markdown(document)
    for number, one in enumerate(document.comparisons):
        said = headline(document, one).replace("[", "\\[").replace("]", "\\]")
        assert text.splitlines()[number] == f"- **`{one.candidate.spec}`** against `demo`: {said}."
    overall, domains = tables(text)
    assert overall[0] == ["candidate", "mean KLD (nats)", "99% KLD (nats)", "same top-1", "PPL ratio"]
    assert [row[0] for row in overall[2:]] == ["`demo@int8`", "`demo@bf16`"]
    assert [row[:2] for row in domains[2:4]] == [["`demo@int8`", "`prose`"], ["`demo@int8`", "`code`"]]
    kl = document.comparisons[0].overall.metrics["kl"].statistics["mean"]
    assert overall[2][1].startswith(f"{kl.value:.4f}"[:5]) and "\\[" in overall[2][1]
    assert "120 positions in 4 windows of 4 documents of builtin (hash abcdef0123456789)" in text
    assert text.endswith("\n- a note that a reader must know\n")


def test_one_candidate_has_no_column_of_candidates_by_domain(table):
    document = summary(token_table(("demo@int8",)), reference=source("demo"))
    text = markdown(document)
    assert text.startswith("**`demo@int8`** against `demo`: mean KL ")
    assert tables(text)[1][0][0] == "domain"


def test_ranked_candidates_come_best_first_with_the_places_they_can_have(document):
    places = [
        Place(candidate=n, best=1, worst=2, tied=[o]) for n, o in (("demo@bf16", "demo@int8"), ("demo@int8", "x"))
    ]
    ranked = document.model_copy(update={"ranking": Ranking(metric="kl", confidence=0.95, places=places, pairs=[])})
    overall = tables(markdown(ranked))[0]
    assert [row[:2] for row in overall[2:]] == [["1-2", "`demo@bf16`"], ["1-2", "`demo@int8`"]]


def test_bounds_are_marked_and_estimates_are_called_that(document):
    changed = document.model_copy(deep=True)
    kl = changed.comparisons[0].overall.metrics["kl"]
    low = kl.statistics.pop("mean")
    kl.statistics["mean_low"] = low
    object.__setattr__(changed.comparisons[1].overall.metrics["kl"], "exactness", "estimated")
    overall = tables(markdown(changed))[0]
    assert overall[2][1].startswith("&gt;= 0.01") and overall[3][1].endswith("(estimated)")


@pytest.mark.parametrize("kind", ["agree", "ppl"])
def test_other_kinds_of_runs_have_their_own_columns(kind):
    table = token_table(("m",), pair=kind != "ppl")
    document = summary(table, kind=kind, reference=source("demo") if kind == "agree" else None)
    heading = tables(markdown(document))[0][0]
    assert heading[:2] == (["model", "perplexity"] if kind == "ppl" else ["candidate", "same top-1"])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_can_neither_end_a_cell_nor_become_markup(name, document):
    changed = document.model_copy(deep=True)
    object.__setattr__(changed.comparisons[0].candidate, "spec", name)
    object.__setattr__(changed.comparisons[0].domains[0], "name", name)
    changed.notes.append(name)
    text = markdown(changed)
    overall, domains = tables(text)
    assert {len(row) for row in overall} == {5} and {len(row) for row in domains} == {6}
    assert printable(text, lines=True) == text  # standard output shows it as it is
    assert "<img" not in re.sub(r"(`+) ?.*?\1", "", text) and not re.search(r"(?<!`)@team", re.sub(r"`.*?`", "", text))
    shown = rows(changed)[0]["candidate"]
    assert shown.lstrip("'") == printable(name) and (shown[0] == "'") == (name[0] in "=@")


def test_csv_has_every_figure_once_with_every_digit(document):
    found = rows(document)
    assert list(found[0]) == [
        *("candidate", "part", "group", "metric", "statistic", "value", "low", "high", "se"),
        *("confidence", "method", "exactness", "unit", "positions", "documents"),
    ]
    wanted = {
        (one.candidate.spec, group.name, metric.metric, name): figure
        for one in document.comparisons
        for group in (one.overall, *one.domains)
        for metric in group.metrics.values()
        for name, figure in metric.statistics.items()
    }
    assert len(found) == len(wanted)
    for row in found:
        figure = wanted[row["candidate"], row["group"], row["metric"], row["statistic"]]
        ends = [None if row[name] == "" else float(row[name]) for name in ("low", "high", "se")]
        assert (float(row["value"]), *ends) == (figure.value, figure.low, figure.high, figure.se)
        assert row["method"] == figure.method and (row["confidence"] == "") == (not figure.interval.known)
    assert {row["part"] for row in found} == {"overall", "domain"}
