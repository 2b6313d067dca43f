"""Plans: the number of documents is that with which the gate's own rule decides."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from evalgate.core import Limits
from evalgate.errors import ScoreError, UsageError
from evalgate.gate.guarded import Guarded
from evalgate.gate.oneline import one_rule
from evalgate.gate.plan import plan
from evalgate.metrics import Series, Statistic, split_candidates
from evalgate.stats.intervals import Sample
from evalgate.stats.samplesize import documents_needed
from tests.evalgate.sample_run import token_table


def scores_of(means, **columns):
    """A candidate whose documents have these mean KL, every position the same."""
    table = token_table(("cand",), documents=len(means))
    per = len(table) // len(means)
    for name, values in {"kl": np.repeat(means, per), **columns}.items():
        field = table.schema.field(name)
        filled = np.broadcast_to(np.asarray(values, dtype=float), len(table))
        table = table.set_column(table.schema.get_field_index(name), field, pa.array(filled).cast(field.type))
    return next(split_candidates(table, noise_floor=1e-6))


def passes(means, limit):
    sample = Sample(Series(means), np.arange(len(means)), support=(0.0, np.inf))
    return Guarded(sample, Statistic("mean")).verdict(Limits(None, limit), confidence=0.95) == "pass"


def test_as_many_documents_as_planned_give_the_planned_power():
    rng = np.random.default_rng(0)
    found = plan(one_rule("max", "kl=0.02"), scores_of(rng.gamma(2, 0.005, 300)))
    assert (found.verdict, found.pilot_documents, found.limit) == ("pass", 300, 0.02)
    assert found.value == pytest.approx(0.01, rel=0.15)
    power = np.mean([passes(rng.gamma(2, 0.005, found.documents), 0.02) for _ in range(200)])
    assert 0.80 <= power <= 0.99
    assert found.documents_low <= found.documents <= found.documents_high


def test_a_pilot_without_a_flip_is_not_sure_that_there_is_none():
    """The gate needs hundreds of documents to rule a flip in a hundred out, and so does its plan."""
    ones = scores_of(np.zeros(16), ref_top1=1, cand_top1=1)
    found = plan(one_rule("min", "top1_agreement=0.99"), ones)
    sample = Sample(Series(np.ones(found.documents)), np.arange(found.documents), support=(0.0, 1.0))
    gate = Guarded(sample, Statistic("mean"), ideal=1.0)
    assert gate.verdict(Limits(0.99, None), confidence=0.95) == "pass"
    assert found.documents > 300 and found.documents_high is None


def test_a_figure_at_its_limit_has_no_plan():
    means = np.random.default_rng(1).gamma(2, 0.005, 40)
    found = plan(one_rule("max", f"kl={means.mean()}"), scores_of(means))
    assert found.documents is None and found.documents_high is None


def test_a_fail_and_a_percentile_are_planned():
    means = np.random.default_rng(2).gamma(4, 0.01, 60)
    assert plan(one_rule("max", "kl=0.01"), scores_of(means)).verdict == "fail"
    found = plan(one_rule("max", "kl.p90=0.5"), scores_of(means))
    assert found.verdict == "pass" and found.documents > 10


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ScoreError, match="at least 2 documents"):
        plan(one_rule("max", "kl=0.1"), scores_of(np.zeros(1)))
    with pytest.raises(UsageError, match="must be too"):
        plan(one_rule("max", "perplexity.ratio=0"), scores_of(np.zeros(4)))
    with pytest.raises(UsageError, match="power must be"):
        plan(one_rule("max", "kl=0.1"), scores_of(np.linspace(0.001, 0.01, 4)), power=1.0)
    with pytest.raises(UsageError, match="needs documents"):
        documents_needed(lambda drawn: True, pilot=0, power=0.9, seed=0)


def test_the_search_finds_the_smallest_number():
    assert documents_needed(lambda drawn: len(drawn) >= 37, pilot=5, power=0.9, seed=0) in (37, 38)
    assert documents_needed(lambda drawn: False, pilot=5, power=0.9, seed=0, draws=25) is None
