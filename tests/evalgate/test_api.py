"""The Python API as a notebook sees it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import pytest

import evalgate
from evalgate.endpoints.budget import Budget
from evalgate.endpoints.settings import EndpointSettings
from evalgate.measure.request import Observer, RunRequest
from evalgate.store.runs import Run
from tests.evalgate.sample_run import source, summary, token_table


def test_the_keywords_are_those_of_a_request() -> None:
    names = {"EndpointSettings": EndpointSettings, "Budget": Budget, "Observer": Observer}
    typed = get_type_hints(evalgate.Options, localns=names)
    fields = get_type_hints(RunRequest)
    for given in ("kind", "reference", "candidates", "data"):
        del fields[given]
    assert typed == {**fields, "out": str | Path | None, "observer": Observer | None}


@pytest.fixture(scope="module")
def run() -> Run:
    table = token_table(tuple(f"candidate-{n}" for n in range(4)), documents=20)
    made = summary(table, reference=source("demo"), notes=["a note" * 200] * 50)
    return Run(summary=made, table=table, manifest={"files": {str(n): n for n in range(10_000)}})


def test_a_cell_that_ends_in_a_result_prints_little(run: Run) -> None:
    comparison = run.summary.comparisons[0]
    shown = [run, run.summary, run.summary.corpus, comparison, comparison.overall, comparison.overall.metrics["kl"]]
    for value in shown:
        assert 20 < len(repr(value)) <= 1000, type(value)
        assert str(value) == repr(value)
    assert repr(run) == (
        "Run: kl of candidate-0, candidate-1, candidate-2, candidate-3 against demo, 2,400 rows, not written"
    )
    assert repr(comparison.overall.metrics["kl"].statistics["mean"]).startswith("StoredFigure(value=")
    many = replace(run, summary=run.summary.model_copy(update={"comparisons": run.summary.comparisons * 100}))
    assert len(repr(many)) == 500
