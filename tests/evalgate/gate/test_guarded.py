"""Passes rest on the interval and on the bound of clipped documents; families of rules share one error rate."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from evalgate.core import Figure, Interval, Limits
from evalgate.gate.family import decide
from evalgate.gate.figures import RuleFigure
from evalgate.gate.guarded import Guarded
from evalgate.gate.judge import judge
from evalgate.gate.measures import BesidePercentile, Excess
from evalgate.gate.policy import Rule
from evalgate.metrics import Series, Statistic, get
from evalgate.stats.intervals import Sample
from evalgate.stats.paired_percentile import PairedPercentile
from tests.evalgate.gate.test_judge import RUN, TABLE, only, policy, put, run_of
from tests.evalgate.sample_run import token_table
from tests.evalgate.stats.populations import corpus

MEAN, P99 = Statistic("mean"), Statistic("p99", "percentile", level=99)
KL = get("kl")


def guarded(values, documents, statistic=MEAN, **options):
    return Guarded(Sample(Series(values), documents, support=(0.0, math.inf)), statistic, **options)


def rule_figure(measure, limit):
    return RuleFigure(measure, Limits(None, limit), KL, KL.statistics[0], "exact", 10, 100)


def test_an_interval_inside_the_limit_is_not_enough():
    """12 equal documents: nothing in them says that the next is not ten times over the limit."""
    few = guarded(np.linspace(0.4, 0.6, 12), np.arange(12))
    limits = Limits(None, 1.0)
    assert limits.verdict(few.figure(limits, confidence=0.95).interval) == "pass"
    assert few.verdict(limits, confidence=0.95) == "undecided"
    said = few.reservation(limits, confidence=0.95)
    assert said.startswith("a document of average length counts as at most 3 (0 cut, at most 26.5% of documents), and")
    many = guarded(np.linspace(0.4, 0.6, 40), np.arange(40))
    assert many.verdict(limits, confidence=0.95) == "pass"


def test_long_documents_count_by_their_length():
    """One long document over the limit outweighs many short ones within it."""
    values = np.concatenate([np.full(400, 0.2), np.full(4000, 1.5)])
    documents = np.concatenate([np.repeat(np.arange(40), 10), np.full(4000, 40)])
    assert not guarded(values, documents).settled(Limits(None, 1.0), confidence=0.95)
    assert guarded(values[:400], documents[:400]).settled(Limits(None, 1.0), confidence=0.95)


def test_what_a_policy_clips_is_what_counts():
    values = np.full(30, 0.5)
    values[3] = 40.0
    one = guarded(values, np.arange(30), clip=2.0)
    assert "counts as at most 2 (1 cut" in one.reservation(Limits(None, 1.0), confidence=0.95)
    assert not guarded(values, np.arange(30), clip=20.0).settled(Limits(None, 1.0), confidence=0.95)


@pytest.mark.parametrize(("groups", "kind"), [(12, "equal"), (24, "lognormal"), (50, "equal")])
def test_ten_rules_at_their_limits_share_one_error_rate(groups, kind):
    """Heavy-tailed documents, all truly at the limit: any pass is wrong, and 2.5 % of families may have one."""
    rng = np.random.default_rng(groups)
    families, wrong = 60, 0
    for _ in range(families):
        drawn = [corpus(rng, groups, kind) for _ in range(10)]
        figures = [rule_figure(guarded(one.kl(1.5), one.documents), 1.0) for one in drawn]
        wrong += "pass" in [d.verdict for d in decide(figures, confidence=0.95, correction="holm")]
    assert wrong / families <= 0.025 + 3 * math.sqrt(0.025 * 0.975 / families)


def test_documents_ten_percent_beyond_the_limit_rarely_pass():
    rng = np.random.default_rng(5)
    runs = 200
    wrong = 0
    for _ in range(runs):
        drawn = corpus(rng, 24, "equal")
        wrong += guarded(drawn.kl(1.5), drawn.documents).verdict(Limits(None, 1 / 1.1), confidence=0.95) == "pass"
    assert wrong / runs <= 0.025 + 3 * math.sqrt(0.025 * 0.975 / runs)


def test_candidates_are_one_family_with_the_rules():
    names = ("a", "b", "c", "d")
    report = judge(policy(Rule(metric="kl", max=1.0), correction="holm"), run_of(token_table(names, documents=16)))
    levels = [c.rules[0].confidence for c in report.candidates]
    assert [c.verdict for c in report.candidates] == ["pass"] * 4
    assert min(levels) <= max(levels) == pytest.approx(1 - 0.05 / 4)
    lone = judge(
        policy(Rule(metric="kl", max=1.0), correction="holm"), run_of(token_table(names, documents=16)), candidate="a"
    )
    assert lone.candidates[0].rules[0].confidence == 0.95


def test_of_a_corpus_that_is_all_there_is_the_figure_is_known():
    value = TABLE.column("kl").to_numpy().astype(float).mean()
    for limit, wanted in ((value * 1.001, "pass"), (value * 0.999, "fail")):
        report = judge(policy(Rule(metric="kl", max=limit), population="corpus"), RUN)
        rule = only(report)
        assert report.population == "corpus" and rule.verdict == wanted
        assert rule.low == rule.high == rule.value == pytest.approx(value) and rule.method == "all documents"


def estimated_table(*, low_by: float = 0.0, seed: int = 3) -> pa.Table:
    """KL 0.02 +- 0.01 a document, some positions negative; certain lower bounds that the values miss by `low_by`."""
    table = token_table(("demo@int8",), documents=60)
    rng = np.random.default_rng(seed)
    kl = np.repeat(rng.uniform(0.01, 0.03, 60), 30) + rng.normal(0, 0.01, len(table))
    for name, values in (("kl", kl), ("kl_se", np.full(len(kl), 0.01)), ("kl_low", np.maximum(kl + low_by, 0.0))):
        if name in table.column_names:
            table = table.drop_columns([name])
        table = table.append_column(name, pa.array(values.astype(np.float32)))
    return table


@pytest.mark.parametrize("population", ["documents", "corpus"])
def test_a_rule_on_an_estimated_mean_keeps_to_its_certain_bound(population: str) -> None:
    """0.02 on its own would pass a limit of 0.03; the bound, 0.05 or more, proves that it must not."""
    rule = policy(Rule(metric="kl", max=0.03), population=population)
    assert only(judge(rule, run_of(estimated_table(low_by=-0.01)))).verdict == "pass"
    held = only(judge(rule, run_of(estimated_table(low_by=0.03))))
    assert held.verdict == "fail" and held.value is not None and held.value > 0.045


def test_single_negative_estimates_do_not_forbid_a_ratio() -> None:
    before, now = estimated_table(low_by=-0.05), estimated_table(low_by=-0.05, seed=4)
    assert (before.column("kl").to_numpy() < 0).any()
    rule = policy(Rule(metric="kl", against="baseline", max_ratio=2.0))
    assert only(judge(rule, run_of(now), baseline=run_of(before))).verdict == "pass"


def test_a_baseline_percentile_is_paired_and_decides():
    table = token_table(("demo@int8",), documents=60)
    ours = np.random.default_rng(0).gamma(2, 0.01, len(table))
    theirs = ours * np.random.default_rng(1).uniform(0.98, 1.02, len(ours))
    run, before = (run_of(put(table, "kl", values)) for values in (ours, theirs))
    gap = 0.02
    report = judge(policy(Rule(metric="kl", statistic="p90", max=gap, against="baseline")), run, baseline=before)
    rule = only(report)
    assert rule.verdict == "pass" and rule.high - rule.low < 0.01
    assert "more positions count as beyond the percentile" in rule.reason
    worse = run_of(put(table, "kl", theirs / 3))
    report = judge(policy(Rule(metric="kl", statistic="p90", max=0.0, against="baseline")), run, baseline=worse)
    assert only(report).verdict == "fail"


def test_a_baseline_percentile_at_its_limit_rarely_passes():
    rng = np.random.default_rng(9)
    wrong, runs = 0, 60
    for _ in range(runs):
        drawn = corpus(rng, 24, "equal")
        own, base = drawn.kl(1.5), np.exp(1.5 * (0.95 * drawn.latent + math.sqrt(1 - 0.95**2) * drawn.noise) - 1.125)
        beside = BesidePercentile(PairedPercentile(own, base, drawn.documents, 90.0), None)
        (decision,) = decide([rule_figure(beside, 0.0)], confidence=0.95, correction="none")
        wrong += decision.verdict == "pass"
    assert wrong / runs <= 0.025 + 3 * math.sqrt(0.025 * 0.975 / runs)


def test_a_floor_shares_the_error_rate_with_its_figure():
    values = np.random.default_rng(3).gamma(4, 0.25, 60)
    own = guarded(values, np.arange(60))
    floor = Figure(0.2, Interval(0.1, 0.3, 0.95), documents=8)
    found = Excess(own, floor, "lower", (0.0, math.inf)).figure(Limits(None, 3.0), confidence=0.95)
    each = own.figure(Limits(), confidence=0.975)
    wide = 0.1 * t_quantile(0.9875, 7) / t_quantile(0.975, 7)
    assert (found.low, found.high) == pytest.approx((each.low - 0.2 - wide, each.high - 0.2 + wide))
    assert found.interval.confidence == 0.95


def test_a_floor_of_one_document_is_not_known_exactly():
    """Its certain lower end, 0, is all that a pass may subtract; a fail is out of reach."""
    values = np.full(60, 1.0) + np.linspace(-0.1, 0.1, 60)
    floor = Figure(0.9, Interval(None, None), documents=1)
    held = Excess(guarded(values, np.arange(60)), floor, "lower", (0.0, math.inf))
    found = held.figure(Limits(None, 0.5), confidence=0.95)
    assert found.low is None and found.high > 0.9
    assert not held.settled(Limits(None, 0.5), confidence=0.95)


def t_quantile(p, df):
    from scipy.stats import t

    return float(t.ppf(p, df))
