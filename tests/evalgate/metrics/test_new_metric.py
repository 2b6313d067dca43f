"""A metric on existing columns is one file: a made-up one is summarized, cut, limited by a policy and printed."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from evalgate import metrics
from evalgate.gate.judge import judge
from evalgate.gate.policy import Policy, Rule
from evalgate.reports import terminal
from evalgate.stats.slices import slice_metric
from evalgate.store.runs import Run
from tests.evalgate.sample_run import source, summary, token_table

SOURCE = '''
"""How much less sure the candidate is of its choice, in nats: the reference's margin minus the candidate's."""

from evalgate.metrics import Metric, Series, mean, percentiles


def series(scores):
    return {"value": Series(scores.floats("ref_margin") - scores.floats("cand_margin"))}


METRIC = Metric(
    name="margin_loss",
    unit="nats",
    better="zero",
    kinds=("kl",),
    columns=("ref_margin", "cand_margin"),
    pair=True,
    series=series,
    statistics=(mean(), *percentiles(99)),
)
'''


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    (tmp_path / "margin_loss.py").write_text(SOURCE)
    monkeypatch.setattr(metrics, "__path__", [*metrics.__path__, str(tmp_path)])
    metrics.registry.cache_clear()
    yield
    metrics.registry.cache_clear()
    sys.modules.pop("evalgate.metrics.margin_loss", None)


def test_one_file_is_a_metric(made_up):
    table = token_table(("demo@int8",), documents=24)
    document = summary(table, reference=source("demo"))
    loss = np.asarray(table.column("ref_margin"), float) - np.asarray(table.column("cand_margin"), float)
    stored = document.comparisons[0].overall.metrics["margin_loss"].statistics
    assert stored["mean"].value == pytest.approx(loss.mean())
    assert stored["p99"].value == pytest.approx(np.percentile(loss, 99))
    assert "margin_loss" in terminal.render(document).lower()

    run = Run(summary=document, table=table, manifest={})
    rules = (Rule(metric="margin_loss", min=-1.0, max=1.0), Rule(metric="margin_loss", statistic="p97", max=-1.0))
    near, far = judge(Policy(rules=rules), run).candidates[0].rules
    assert (near.verdict, near.low, near.high) == ("pass", stored["mean"].low, stored["mean"].high)
    assert (far.verdict, far.value) == ("fail", pytest.approx(np.percentile(loss, 97)))

    scores = next(metrics.split_candidates(table))
    parts = slice_metric(scores, "margin_loss", by="domain").slices
    assert [p.figure.n for p in parts] == [360, 360]
