"""Stopping early: the question of the fixed gate, and an error rate that holds with a look after every document."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from evalgate.core import Limits
from evalgate.errors import UsageError
from evalgate.gate.following import followed
from evalgate.gate.guarded import Guarded
from evalgate.gate.policy import PRESETS, Policy, Rule, Settings, load_policy
from evalgate.gate.sequential import SequentialJudge, replay, shuffled
from evalgate.gate.track import Track
from evalgate.metrics import Series, Statistic
from evalgate.stats.intervals import Sample
from tests.evalgate.sample_run import token_table

KL = Rule(metric="kl", max=0.01)
NLL = Rule(metric="nll", statistic="difference", min=-0.01, max=0.03)


def policy(*rules, **settings):
    return Policy(policy=Settings(**settings), rules=rules)


def table_of(means, *, candidates=("cand",), per=4):
    """A document per mean: `per` positions of KL that average to it."""
    table = token_table(candidates, documents=len(means))
    table = table.filter(pa.compute.less_equal(table.column("position"), per))
    spread = np.tile(np.linspace(0.5, 1.5, per), len(means) * len(candidates))
    return put(table, "kl", np.repeat(np.tile(means, len(candidates)), per) * spread)


def put(table, name, values):
    field = table.schema.field(name)
    return table.set_column(table.schema.get_field_index(name), field, pa.array(values).cast(field.type))


def judged(table, *rules, seed=0, **settings):
    candidates = len(table.column("candidate").cast("string").unique())
    judge = SequentialJudge(policy(*rules, **settings), candidates=candidates, seed=seed)
    replay(judge, table, seed=seed, noise_floor=1e-6)
    return judge


def shown(totals, sizes, rule, *, corpus=False, error=0.05):
    """A track's verdict on documents as they come, and how many it took."""
    track = Track(followed(rule), np.asarray(sizes, dtype=float), None, corpus)
    for total, size in zip(totals, sizes, strict=True):
        track.take(float(total), float(size))
        for verdict, given in (("fail", track.fails), ("pass", track.passes)):
            if given(error):
                track.settle(verdict, error)
                return track
    return track


def fixed(totals, sizes, limit):
    """The verdict of the gate that sees all documents at once."""
    sample = Sample(Series(np.asarray(totals), sizes=np.asarray(sizes, dtype=float)), np.arange(len(sizes)))
    return Guarded(sample, Statistic("mean")).verdict(Limits(None, limit), confidence=0.95)


def test_it_stops_early_on_a_pass_and_on_a_fail_and_says_where():
    rng = np.random.default_rng(0)
    good, bad = rng.gamma(4, 0.0005, 200), rng.gamma(4, 0.02, 200)
    passed = judged(table_of(good), KL)
    assert passed.decided and passed.verdicts()[0].verdict == "pass"
    assert passed.stopped().documents < 60 and passed.stopped().of == 200
    failed = judged(table_of(bad), KL)
    assert failed.verdicts()[0].verdict == "fail" and failed.stopped().documents < 60
    (rule,) = passed.verdicts()[0].rules
    assert rule.low <= good.mean() <= rule.high <= 0.01 and rule.figure == "kl mean"
    assert "stays within 0.01; a document of average length counts as at most 0.05" in rule.reason
    (rule,) = failed.verdicts()[0].rules
    assert 0.01 < rule.low <= bad.mean() and rule.method.endswith("betting")


def test_fixed_and_sequential_ask_for_the_mean_over_positions():
    """60 short documents at 0.002, 20 long ones at 0.02: the mean over documents is below 0.01, over positions not."""
    sizes = np.concatenate([np.full(60, 10), np.full(20, 400)])
    rng = np.random.default_rng(0)
    totals = np.concatenate([np.full(60, 0.002), np.full(20, 0.02)]) * rng.gamma(16, 1 / 16, 80) * sizes
    assert (totals / sizes).mean() < 0.01 < totals.sum() / sizes.sum()
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(80)
        for corpus in (False, True):
            assert shown(totals[order], sizes[order], KL, corpus=corpus).verdict == "fail"
    assert fixed(totals, sizes, 0.01) == "fail"


def test_one_document_is_undecided():
    assert shown([0.1], [100], KL).verdict == "undecided"
    assert fixed([0.1], [100], 0.01) == "undecided"
    assert shown([0.1], [100], KL, corpus=True).verdict == "pass"


def skewed(rng, documents, mean):
    """Means whose log has a standard deviation of 1, and a position count that goes with them."""
    return np.exp(rng.normal(-0.5, 1, documents)) * mean


@pytest.mark.parametrize("corpus", [False, True])
def test_documents_beyond_the_limit_pass_no_more_often_than_promised(corpus):
    """10 % above the limit, with a look after every document, to the last."""
    rng = np.random.default_rng(7)
    runs, wrong = 200, 0
    for _ in range(runs):
        means = skewed(rng, 60, 0.011)
        if corpus:
            means *= 0.011 / means.mean()
        wrong += shown(means * 100, np.full(60, 100), KL, corpus=corpus).verdict == "pass"
    assert wrong / runs <= 0.025 + 3 * math.sqrt(0.025 / runs)


def test_documents_within_the_limit_fail_no_more_often_than_promised():
    rng = np.random.default_rng(8)
    runs = 150
    wrong = sum(shown(skewed(rng, 60, 0.01) * 100, np.full(60, 100), KL).verdict == "fail" for _ in range(runs))
    assert wrong / runs <= 0.025 + 3 * math.sqrt(0.025 / runs)


def test_of_a_whole_corpus_the_figure_is_known():
    means = np.full(10, 0.009)
    means[3] = 0.5
    judge = judged(table_of(means), Rule(metric="kl", max=0.0582), population="corpus")
    (rule,) = judge.verdicts()[0].rules
    assert judge.stopped().documents == 10
    assert rule.verdict == "pass" and rule.low == rule.high == pytest.approx(means.mean(), rel=1e-5)
    assert judged(table_of(means), Rule(metric="kl", max=0.0582)).verdicts()[0].verdict == "undecided"


def test_batches_make_no_difference():
    table = table_of(np.random.default_rng(1).gamma(4, 0.002, 50))
    names = table.column("document").to_pylist()
    counts = dict.fromkeys(names, 4)
    domains = dict(zip(names, table.column("domain").to_pylist(), strict=True))
    ends = []
    for step in (1, 3, 50, 200):
        judge = SequentialJudge(policy(KL), candidates=1, seed=0)
        judge.begin(counts, domains=domains, noise_floor=None)
        for start in range(0, len(table), step):
            if judge.take(table.slice(start, step)):
                break
        ends.append((judge.stopped(), judge.verdicts()))
    assert all(end == ends[0] for end in ends)


def test_a_rule_speaks_of_the_documents_that_decided_it():
    means = np.random.default_rng(1).gamma(4, 0.0015, 80)
    judge = judged(table_of(means), Rule(metric="kl", max=0.05), KL)
    early, late = sorted(judge.verdicts()[0].rules, key=lambda rule: rule.documents)
    assert early.documents < late.documents == judge.stopped().documents
    order = [int(name.removeprefix("doc")) for name in shuffled([f"doc{i}" for i in range(80)], seed=0)]
    for rule in (early, late):
        assert rule.verdict == "pass" and rule.positions == 4 * rule.documents
        assert f"after {rule.documents} of 80" in rule.reason and f"[{rule.low:.4g}, {rule.high:.4g}]" in rule.reason
        assert rule.value == pytest.approx(means[order[: rule.documents]].mean(), rel=1e-4)


def test_holm_steps_down_over_rules_and_candidates():
    rng = np.random.default_rng(2)
    table = table_of(rng.gamma(4, 0.0005, 150), candidates=("a", "b"))
    tail = Rule(metric="kl", statistic="p90", max=0.05)
    judge = judged(table, KL, tail, correction="holm")
    assert [c.candidate for c in judge.verdicts()] == ["a", "b"]
    rules = [rule for candidate in judge.verdicts() for rule in candidate.rules]
    assert [rule.verdict for rule in rules] == ["pass"] * 4
    levels = sorted(round((1 - rule.confidence) / 0.05, 6) for rule in rules)
    assert levels[0] == 0.25 and levels == sorted(levels) and levels[-1] > 0.25
    assert rules[1].value is None and "share of positions" in rules[1].reason


def test_agreement_and_domains():
    table = table_of(np.full(80, 0.001))
    for name in ("ref_top1", "cand_top1"):
        table = put(table, name, np.ones(len(table)))
    rule = Rule(metric="top1_agreement", min=0.9, slice={"by": "domain", "name": "code"})
    (verdict,) = judged(table, rule, clip=3).verdicts()[0].rules
    assert verdict.verdict == "pass" and verdict.value == 1 and verdict.high == 1 and verdict.low >= 0.9
    assert verdict.documents <= 40
    with pytest.raises(UsageError, match="no domain 'poetry'"):
        judged(table, Rule(metric="kl", max=1.0, slice={"by": "domain", "name": "poetry"}))


@pytest.mark.parametrize(
    "rule",
    [
        Rule(metric="kl", statistic="p90", min=0.1, max=0.2),
        Rule(metric="kl", max=0.1, against="baseline"),
        Rule(metric="kl", max=0.1, slice={"by": "position", "name": "1"}),
        Rule(metric="greedy_match_length", max=3.0),
    ],
)
def test_what_cannot_be_followed_is_refused(rule):
    with pytest.raises(UsageError, match="document by document"):
        followed(rule)


def test_a_limit_without_room_is_refused():
    pinned = Rule(metric="nll", statistic="difference", min=0.1, max=0.1)
    for rule in (Rule(metric="kl", max=0.0), Rule(metric="top1_agreement", min=1.0), pinned):
        with pytest.raises(UsageError, match="with room"):
            followed(rule)


def differing(differences):
    """A document per mean difference of the two nll, and KL 0."""
    table = table_of(np.zeros(len(differences)))
    nll = np.random.default_rng(0).uniform(20, 21, len(table))
    for name, values in (("ref_nll", nll), ("cand_nll", nll + np.repeat(differences, 4))):
        table = table.set_column(table.schema.get_field_index(name), name, pa.array(values, pa.float64()))
    return table


def test_a_rule_with_two_ends_passes_early_in_the_figures_own_unit():
    differences = np.random.default_rng(5).normal(0.012, 0.004, 400)
    judge = judged(differing(differences), NLL)
    (rule,) = judge.verdicts()[0].rules
    assert rule.verdict == "pass" and judge.stopped().documents < 100
    assert -0.01 <= rule.low <= differences.mean() <= rule.high <= 0.03
    assert rule.value == pytest.approx(differences.mean(), abs=0.003)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_rule_with_two_ends_fails_at_the_last_document_alone(sign):
    """Nothing bounds how far a document may be on the other side, so none but the last look can fail it."""
    differences = 0.01 + sign * np.random.default_rng(5).normal(0.1, 0.004, 60)
    judge = judged(differing(differences), NLL)
    (rule,) = judge.verdicts()[0].rules
    assert rule.verdict == "fail" and judge.stopped().documents == 60
    assert rule.low <= differences.mean() <= rule.high


def test_the_presets_are_followed():
    for name in PRESETS:
        preset = load_policy(name)
        table = differing(np.zeros(150))
        for column in ("ref_top1", "cand_top1"):
            table = put(table, column, np.ones(len(table)))
        judge = SequentialJudge(preset, candidates=1, seed=0)
        replay(judge, table, seed=0, noise_floor=1e-6)
        assert judge.verdicts()[0].verdict == "pass" and judge.stopped().documents < 150, name
