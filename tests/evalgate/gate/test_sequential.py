"""Stopping early: the error rate with a look after every document, and what it saves."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from evalgate.core import Limits
from evalgate.errors import UsageError
from evalgate.gate.gauges import gauge
from evalgate.gate.policy import PRESETS, Policy, Rule, Settings, load_policy
from evalgate.gate.sequential import SequentialJudge, _Track, replay, shuffled
from evalgate.stats.sequential import BettingSequence
from tests.evalgate.sample_run import token_table


def policy(*rules, **settings):
    return Policy(policy=Settings(**settings), rules=rules)


def table_of(means, *, candidates=("cand",), per=4, seed=0):
    """A document per mean: `per` positions of KL that average to it."""
    table = token_table(candidates, documents=len(means))
    keep = pa.compute.less_equal(table.column("position"), per)
    table = table.filter(keep)
    spread = np.tile(np.linspace(0.5, 1.5, per), len(means) * len(candidates))
    kl = np.repeat(np.tile(means, len(candidates)), per) * spread
    index = table.schema.get_field_index("kl")
    return table.set_column(index, table.schema.field("kl"), pa.array(kl, pa.float32()))


def judged(table, *rules, seed=0, **settings):
    candidates = len(table.column("candidate").cast("string").unique())
    judge = SequentialJudge(policy(*rules, **settings), candidates=candidates, seed=seed)
    replay(judge, table, seed=seed, noise_floor=1e-6)
    return judge


KL = Rule(metric="kl", max=0.01)


def test_it_stops_early_on_a_pass_and_on_a_fail_and_says_where():
    rng = np.random.default_rng(0)
    good, bad = rng.gamma(4, 0.0005, 200), rng.gamma(4, 0.02, 200)
    passed = judged(table_of(good), KL)
    assert passed.decided and passed.verdicts()[0].verdict == "pass"
    assert passed.stopped().documents < 160 and passed.stopped().of == 200
    failed = judged(table_of(bad), KL)
    assert failed.verdicts()[0].verdict == "fail" and failed.stopped().documents < 60
    (rule,) = passed.verdicts()[0].rules
    assert rule.low <= good.mean() <= rule.high <= 0.01
    assert "a document counts as at most 0.1 (0 were cut)" in rule.reason and rule.method == "betting sequence"


def test_the_verdict_is_that_of_the_sequence_it_says_it_follows():
    means = np.random.default_rng(3).gamma(4, 0.001, 60)
    table = table_of(means)
    judge = judged(table, KL, seed=5)
    sequence = BettingSequence(clip=0.1, total=60)
    order = shuffled([f"doc{i}" for i in range(60)], seed=5)
    for count, name in enumerate(order, 1):  # noqa: B007
        bounds = sequence.add(float(means[int(name.removeprefix("doc"))]))
        if Limits(None, 0.01).verdict(bounds) != "undecided":
            break
    assert judge.stopped().documents == count
    (rule,) = judge.verdicts()[0].rules
    assert (rule.low, rule.high) == pytest.approx((bounds.low, bounds.high), rel=1e-4)


def test_a_rule_speaks_of_the_documents_that_decided_it_and_in_its_own_figure():
    means = np.random.default_rng(1).gamma(4, 0.001, 80)
    judge = judged(table_of(means), Rule(metric="kl", max=0.05), Rule(metric="top1_agreement", min=0.01))
    early, late = sorted(judge.verdicts()[0].rules, key=lambda rule: rule.documents)
    assert early.documents < late.documents == judge.stopped().documents
    order = [int(name.removeprefix("doc")) for name in shuffled([f"doc{i}" for i in range(80)], seed=0)]
    for rule in (early, late):
        assert rule.verdict == "pass" and rule.positions == 4 * rule.documents and rule.low <= rule.value <= rule.high
        assert f"after {rule.documents} of 80" in rule.reason and f"[{rule.low:.4g}, {rule.high:.4g}]" in rule.reason
        if rule.metric == "kl":
            assert rule.value == pytest.approx(means[order[: rule.documents]].mean(), rel=1e-4)
        else:
            assert "stays within 0.01; a document counts as at least 0 (0 were cut)" in rule.reason


def test_a_whole_corpus_is_its_own_mean():
    means = np.full(10, 0.009)
    means[3] = 0.5
    judge = judged(table_of(means), Rule(metric="kl", max=0.0582))
    (rule,) = judge.verdicts()[0].rules
    assert judge.stopped().documents == 10
    assert rule.verdict == "pass" and rule.low == rule.high == pytest.approx(means.mean(), rel=1e-5)
    assert "of documents are above" not in rule.reason


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


def test_candidates_and_rules_are_all_decided():
    rng = np.random.default_rng(2)
    table = table_of(rng.gamma(4, 0.0005, 150), candidates=("a", "b"))
    tail = Rule(metric="kl", statistic="p90", max=0.05)
    judge = judged(table, KL, tail, clip=10, correction="holm")
    assert [c.candidate for c in judge.verdicts()] == ["a", "b"]
    for candidate in judge.verdicts():
        assert candidate.verdict == "pass"
        assert [r.confidence for r in candidate.rules] == [pytest.approx(1 - 0.05 / 4)] * 2
        assert candidate.rules[1].value is None and "share of positions" in candidate.rules[1].reason


def test_agreement_and_domains():
    table = table_of(np.full(80, 0.001))
    one = pa.array(np.ones(len(table)), pa.int32())
    for name in ("ref_top1", "cand_top1"):
        table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), one)
    rule = Rule(metric="top1_agreement", min=0.9, slice={"by": "domain", "name": "code"})
    judge = judged(table, rule, clip=5)
    (verdict,) = judge.verdicts()[0].rules
    assert verdict.verdict == "pass" and verdict.value == 1 and verdict.high == 1 and verdict.low >= 0.9
    assert verdict.documents <= 40
    with pytest.raises(UsageError, match="no domain 'poetry'"):
        judged(table, Rule(metric="kl", max=1.0, slice={"by": "domain", "name": "poetry"}))


@pytest.mark.parametrize(
    "rule",
    [
        Rule(metric="nll", statistic="difference", max=0.1),
        Rule(metric="delta_prob", max=0.1),
        Rule(metric="kl", statistic="p90", min=0.1, max=0.2),
        Rule(metric="kl", min=0.1),
        Rule(metric="kl", max=0.1, against="baseline"),
        Rule(metric="kl", max=0.1, slice={"by": "position", "name": "1"}),
        Rule(metric="greedy_match_length", max=3.0),
        Rule(metric="delta_prob", statistic="rms", max=0.1),
    ],
)
def test_what_cannot_be_followed_is_refused(rule):
    with pytest.raises(UsageError, match="document by document"):
        gauge(rule, clip=None)


def test_a_limit_without_room_is_refused():
    pinned = Rule(metric="nll", statistic="difference", min=0.1, max=0.1)
    for rule in (Rule(metric="kl", max=0.0), Rule(metric="top1_agreement", min=1.0), pinned):
        with pytest.raises(UsageError, match="with room"):
            gauge(rule, clip=None)


NLL = Rule(metric="nll", statistic="difference", min=-0.01, max=0.03)


def differing(differences):
    """A document per mean difference of the two nll, and KL 0."""
    table = table_of(np.zeros(len(differences)))
    nll = np.random.default_rng(0).uniform(20, 21, len(table))
    for name, values in (("ref_nll", nll), ("cand_nll", nll + np.repeat(differences, 4))):
        table = table.set_column(table.schema.get_field_index(name), name, pa.array(values, pa.float64()))
    return table


def test_a_rule_with_two_ends_passes_early_in_the_figures_own_unit():
    differences = np.random.default_rng(5).normal(0.012, 0.004, 400)
    judge = judged(differing(differences), NLL, KL, clip=10)
    rule, _ = judge.verdicts()[0].rules
    assert rule.verdict == "pass" and judge.stopped().documents < 300
    assert -0.01 <= rule.low <= differences.mean() <= rule.high <= 0.03
    assert rule.value == pytest.approx(differences.mean(), abs=0.003)
    assert "stays within -0.01 to 0.03; a document counts as -0.19 to 0.21 (0 were cut)" in rule.reason


@pytest.mark.parametrize("sign", [1, -1])
def test_a_rule_with_two_ends_fails_from_the_whole_mean_alone(sign):
    differences = 0.01 + sign * np.random.default_rng(5).normal(0.1, 0.004, 60)
    judge = judged(differing(differences), NLL, clip=10)
    (rule,) = judge.verdicts()[0].rules
    assert rule.verdict == "fail" and judge.stopped().documents == 60
    assert rule.low == rule.high == pytest.approx(differences.mean(), rel=1e-6)
    judge = judged(differing(differences), NLL, Rule(metric="nll", statistic="p50", max=1.0), clip=10)
    two_ended, other = judge.verdicts()[0].rules
    assert other.verdict == "fail" and two_ended.verdict == "undecided" and judge.stopped().documents < 60


def test_documents_far_off_on_the_other_side_never_make_a_wrong_fail():
    """55 of 60 are beyond the max and 5 far below it: the mean is within, the mean of cut values beyond."""
    differences = np.full(60, 0.06)
    differences[[3, 17, 30, 44, 59]] = -0.5
    assert -0.01 < differences.mean() < 0.03 < np.clip(differences, -0.19, 0.21).mean()
    for seed in range(8):
        judge = judged(differing(differences), NLL, clip=10, seed=seed)
        (rule,) = judge.verdicts()[0].rules
        assert rule.verdict == "pass" and judge.stopped().documents == 60
        assert rule.value == pytest.approx(differences.mean(), rel=1e-6)


def test_a_bounded_metric_with_two_ends_fails_early():
    """delta_prob is in [-1, 1]: without a clip nothing is cut."""
    one = gauge(Rule(metric="delta_prob", min=-0.02, max=0.02), clip=None)
    assert not one.cut_below and (one.clip, one.least, one.most) == (2.0, 0.98, 1.02)
    assert gauge(Rule(metric="delta_prob", min=-0.02, max=0.02), clip=10).cut_below


def test_the_presets_are_followed():
    for name in PRESETS:
        preset = load_policy(name)
        table = differing(np.zeros(150))
        ones = pa.array(np.ones(len(table)), pa.int32())
        for column in ("ref_top1", "cand_top1"):
            table = table.set_column(table.schema.get_field_index(column), table.schema.field(column), ones)
        judge = SequentialJudge(preset, candidates=1, seed=0)
        replay(judge, table, seed=0, noise_floor=1e-6)
        assert judge.verdicts()[0].verdict == "pass" and judge.stopped().documents < 150, name


def test_the_error_rate_of_a_rule_with_two_ends():
    """Corpora a hair beyond either end, in shapes from even to rare large ones: a pass is wrong."""
    rng = np.random.default_rng(8)
    room, documents, trials, wrong = 0.05, 60, 240, 0
    shapes = (
        lambda: rng.normal(0, 0.02, documents),
        lambda: rng.exponential(0.1, documents),
        lambda: (rng.random(documents) < 0.1) * -0.4,
    )
    for trial in range(trials):
        sign = 1 if trial % 2 else -1
        differences = shapes[trial % 3]()
        differences += sign * room * 1.001 - differences.mean()
        one = gauge(Rule(metric="nll", statistic="difference", min=-room, max=room), clip=20)
        track = _Track(one, documents, 0.9)
        for value in rng.permutation(differences):
            track.add(SimpleScores(value))
            if track.verdict != "undecided":
                break
        assert track.cut == 0  # of these corpora the mean of cut values is the mean
        assert track.verdict in ("pass", "fail") and (track.verdict == "pass" or track.whole)
        wrong += track.verdict == "pass"
    assert wrong / trials <= 0.10 + 3 * math.sqrt(0.09 / trials)


class SimpleScores:
    """One position whose candidate is `difference` nats worse; what a gauge asks of `Scores`."""

    candidate = "c"

    def __init__(self, difference):
        self._columns = {"ref_nll": np.array([3.0]), "cand_nll": np.array([3.0 + difference])}

    def form(self, _):
        return "exact"

    def has(self, name):
        return name in self._columns

    def floats(self, name):
        return self._columns[name]

    noise_floor = None


def first_verdict(means, limit, clip, confidence=0.95):
    """Verdict and documents of a rule that looks after every document: what `_Track` does, without tables."""
    sequence = BettingSequence(clip=clip, confidence=confidence, total=len(means))
    for count, mean in enumerate(means, 1):
        verdict = Limits(None, limit).verdict(sequence.add(mean))
        if verdict != "undecided":
            return verdict, count
    return "undecided", len(means)


def test_the_error_rate_holds_with_a_look_after_every_document():
    """Null: the corpus is a hair worse than the limit, in shapes from even to almost all or nothing."""
    rng = np.random.default_rng(7)
    limit, documents, trials, wrong = 0.05, 80, 240, 0
    shapes = (
        lambda: rng.gamma(4, 1, documents),
        lambda: rng.exponential(1, documents) ** 2,
        lambda: (rng.random(documents) < 0.12).astype(float) + 1e-3,
    )
    for trial in range(trials):
        means = shapes[trial % 3]()
        means *= limit * 1.001 / means.mean()  # this very corpus, not one like it on average
        means = np.minimum(means, 10 * limit)
        means *= limit * 1.001 / means.mean()
        verdict, _ = first_verdict(rng.permutation(means), limit, clip=max(10 * limit, means.max()), confidence=0.9)
        wrong += verdict == "pass"
    assert wrong / trials <= 0.10 + 3 * math.sqrt(0.09 / trials)


def test_documents_saved_at_three_effect_sizes(capsys):
    """Of a corpus of 400, and against a test of fixed size that knows effect and spread beforehand (power 0.9)."""
    from evalgate.stats.samplesize import documents_needed

    rng = np.random.default_rng(11)
    limit, used, planned = 0.01, {}, {}
    for effect in (0.5, 0.9, 2.0):
        corpora = [rng.gamma(1, limit * effect, 400) for _ in range(12)]
        used[effect] = float(np.mean([first_verdict(means, limit, clip=10 * limit)[1] for means in corpora]))
        planned[effect] = documents_needed(corpora[0], np.arange(400), limit=limit).documents
    with capsys.disabled():
        print(f"\nsequential gate: documents of 400 used {used}, fixed size {planned} (figure / limit: documents)")
    assert used[0.5] < 200 and used[2.0] < 100
    assert used[2.0] < used[0.5] < used[0.9] <= 400
