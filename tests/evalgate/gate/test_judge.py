"""Rules to verdicts, checked against the statistics they stand on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy.stats import t

from evalgate.core import Figure, Interval, Limits
from evalgate.errors import MismatchError, UsageError
from evalgate.gate.family import decide
from evalgate.gate.figures import RuleFigure
from evalgate.gate.judge import judge, worst
from evalgate.gate.measures import Excess
from evalgate.gate.policy import Policy, Rule, Settings
from evalgate.metrics import get, split_candidates
from evalgate.stats.clustered import clustered_mean
from evalgate.stats.percentiles import Percentiles
from evalgate.store.runs import Run
from evalgate.summary import Noise, StoredFigure
from tests.evalgate.sample_run import source, summary, token_table

REFERENCE = source("demo")


def run_of(table, noise=None):
    document = summary(table, reference=REFERENCE)
    if noise is not None:
        comparisons = [c.model_copy(update={"noise": noise}) for c in document.comparisons]
        document = document.model_copy(update={"comparisons": comparisons})
    return Run(summary=document, table=table, manifest={})


def policy(*rules, **settings):
    return Policy(policy=Settings(**settings), rules=rules)


def only(report):
    return report.candidates[0].rules[0]


TABLE = token_table(("demo@int8",), documents=12)
RUN = run_of(TABLE)
SCORES = next(split_candidates(TABLE, noise_floor=REFERENCE.noise_floor))


def identical(documents):
    """A candidate that is its reference."""
    table = token_table(("demo@same",), documents=documents)
    for name in ("kl", "reverse_kl", "js", "tv", "regret"):
        table = put(table, name, np.zeros(len(table)))
    table = put(table, "topk_overlap", np.ones(len(table)))
    for name in ("nll", "entropy", "top1", "margin", "rank"):
        table = put(table, f"ref_{name}", table.column(f"cand_{name}").to_numpy())
    return table


def put(table, name, values):
    field = table.schema.field(name)
    return table.set_column(table.schema.get_field_index(name), field, pa.array(values).cast(field.type))


@pytest.mark.parametrize(
    ("low", "high", "minimum", "maximum", "wanted"),
    [
        (1.0, 2.0, None, 2.0, "pass"),
        (1.0, 2.0, None, 1.5, "undecided"),
        (1.0, 2.0, None, 1.0, "undecided"),
        (1.0, 2.0, None, 0.9, "fail"),
        (1.0, 2.0, 1.0, None, "pass"),
        (1.0, 2.0, 2.0, None, "undecided"),
        (1.0, 2.0, 2.1, None, "fail"),
        (1.0, 2.0, 0.5, 2.5, "pass"),
        (1.0, 2.0, 1.5, 2.5, "undecided"),
        (1.0, 2.0, 3.0, 4.0, "fail"),
        (1.0, None, None, 0.5, "fail"),
        (1.0, None, None, 5.0, "undecided"),
        (1.0, None, 0.5, None, "pass"),
        (None, 2.0, None, 3.0, "pass"),
        (None, None, None, 3.0, "undecided"),
        (None, None, 1.0, None, "undecided"),
    ],
)
def test_verdicts(low, high, minimum, maximum, wanted):
    assert Limits(minimum, maximum).verdict(Interval(low, high)) == wanted


def test_worst():
    for a, b in product(("pass", "fail", "undecided"), repeat=2):
        wanted = "fail" if "fail" in (a, b) else "undecided" if "undecided" in (a, b) else "pass"
        assert worst([a, b]) == wanted


def test_a_mean_rule_is_judged_by_the_summary_s_interval():
    wanted = RUN.summary.comparisons[0].overall.metrics["kl"].statistics["mean"]
    rule = only(judge(policy(Rule(metric="kl", max=1.0)), RUN))
    assert (rule.value, rule.low, rule.high) == (wanted.value, wanted.low, wanted.high)
    assert (rule.verdict, rule.documents, rule.positions) == ("pass", 12, 360)
    assert only(judge(policy(Rule(metric="kl", max=wanted.value)), RUN)).verdict == "undecided"
    assert only(judge(policy(Rule(metric="kl", max=wanted.low * 0.99)), RUN)).verdict == "fail"


@pytest.mark.parametrize(
    ("metric", "statistic"),
    [("kl", "p99"), ("kl", "median"), ("top1_agreement", "mean"), ("perplexity", "ratio"), ("delta_prob", "rms"),
     ("bits_per_byte", "difference"), ("flip", "mean"), ("nll", "p95")],
)  # fmt: skip
def test_every_kind_of_statistic_agrees_with_the_summary(metric, statistic):
    wanted = RUN.summary.comparisons[0].overall.metrics[metric].statistics[statistic]
    rule = only(judge(policy(Rule(metric=metric, statistic=statistic, max=1e6)), RUN))
    assert (rule.value, rule.low, rule.high) == pytest.approx((wanted.value, wanted.low, wanted.high))


def test_domains_and_slices():
    wanted = next(d for d in RUN.summary.comparisons[0].domains if d.name == "code").metrics["kl"].statistics["mean"]
    rule = only(judge(policy(Rule(metric="kl", max=1.0, slice={"by": "domain", "name": "code"})), RUN))
    assert (rule.value, rule.low, rule.high, rule.documents) == (wanted.value, wanted.low, wanted.high, 6)
    kl, position = SCORES.floats("kl"), SCORES.position
    keep = (position >= 4) & (position < 8)
    rule = only(judge(policy(Rule(metric="kl", max=1.0, slice={"by": "position", "name": "4-7"})), RUN))
    assert rule.value == pytest.approx(kl[keep].mean())
    assert rule.positions == keep.sum()
    texts = {int(i): ("word" if i % 2 else " ") for i in SCORES.integers("token")}
    words = SCORES.integers("token") % 2 == 1
    sliced = policy(Rule(metric="kl", max=1.0, slice={"by": "token", "name": "word"}))
    assert only(judge(sliced, replace(RUN, token_texts=texts))).value == pytest.approx(kl[words].mean())
    with pytest.raises(UsageError, match=r"rule 'kl mean in domain poetry <= 1'.*use one of prose, code"):
        judge(policy(Rule(metric="kl", max=1.0, slice={"by": "domain", "name": "poetry"})), RUN)


def test_a_percentile_that_no_summary_lists():
    rule = only(judge(policy(Rule(metric="kl", statistic="p97.5", max=1.0)), RUN))
    wanted = Percentiles.of(SCORES.floats("kl"), SCORES.document).figure(97.5)
    assert (rule.value, rule.low, rule.high) == (wanted.value, wanted.low, wanted.high)


def test_bounds_can_fail_but_not_pass_a_limit_above_them():
    kl = TABLE.column("kl").to_numpy().astype(float)
    bounded = TABLE.rename_columns(["kl_low" if n == "kl" else n for n in TABLE.column_names])
    bounded = bounded.append_column("kl_high", pa.array([None] * len(kl), pa.float32()))
    run = replace(RUN, table=bounded)
    mean = kl.mean()
    failed = only(judge(policy(Rule(metric="kl", max=mean / 10)), run))
    assert (failed.verdict, failed.value, failed.exactness, failed.high) == ("fail", None, "bounded", None)
    assert only(judge(policy(Rule(metric="kl", max=mean * 100)), run)).verdict == "undecided"
    known = bounded.set_column(bounded.schema.get_field_index("kl_high"), "kl_high", pa.array(kl * 2, pa.float32()))
    assert only(judge(policy(Rule(metric="kl", max=mean * 100)), replace(RUN, table=known))).verdict == "pass"


def test_a_baseline_is_paired():
    before = token_table(("demo@int8",), documents=12)
    ours, theirs = TABLE.column("kl").to_numpy().astype(float), before.column("kl").to_numpy().astype(float) * 0.5
    theirs *= np.random.default_rng(0).uniform(0.98, 1.02, len(theirs))
    before = put(before, "kl", theirs)
    report = judge(policy(Rule(metric="kl", max=0.0, against="baseline")), RUN, baseline=run_of(before))
    wanted = clustered_mean(ours - before.column("kl").to_numpy().astype(float), SCORES.document, confidence=0.95)
    rule = only(report)
    assert (rule.value, rule.low, rule.high) == pytest.approx((wanted.value, wanted.low, wanted.high))
    assert rule.verdict == "fail"
    ratio = only(judge(policy(Rule(metric="kl", against="baseline", max_ratio=1.9)), RUN, baseline=run_of(before)))
    assert ratio.value == pytest.approx(ours.sum() / theirs.sum()) and ratio.verdict == "fail"
    tail = only(judge(policy(Rule(metric="kl", statistic="p99", max=0.0, against="baseline")), RUN, baseline=RUN))
    # Twelve documents do not say where a 99th percentile ends.
    assert tail.value == 0 and tail.low is None and tail.high is None and tail.verdict == "undecided"
    changes = {(c.metric, c.statistic): c for c in report.candidates[0].changes}
    assert changes["kl", "mean"].difference == pytest.approx(wanted.value)
    assert changes["kl", "mean"].baseline == pytest.approx(theirs.mean(), rel=1e-6)
    assert {("kl", "p99"), ("top1_agreement", "mean"), ("nll", "difference")} <= set(changes)


def test_a_baseline_of_other_text_is_refused():
    other = put(TABLE, "token", np.asarray(TABLE.column("token")) + 1)
    with pytest.raises(MismatchError, match="not the same token"):
        judge(policy(Rule(metric="kl", max=0.0, against="baseline")), RUN, baseline=run_of(other))
    two = run_of(token_table(("a", "b"), documents=12))
    with pytest.raises(MismatchError, match="several others"):
        judge(policy(Rule(metric="kl", max=1.0)), RUN, baseline=two)
    with pytest.raises(UsageError, match="--baseline"):
        judge(policy(Rule(metric="kl", max=0.0, against="baseline")), RUN)


def floor_of(value, low, high):
    figure = StoredFigure(value=value, low=low, high=high, se=None, method="t")
    return Noise(conditions=["x"], windows=1, positions=1, figures={"kl": {"mean": figure}}, excess={})


def test_excess_over_the_noise_floor():
    figure = RUN.summary.comparisons[0].overall.metrics["kl"].statistics["mean"]
    run = run_of(TABLE, noise=floor_of(0.004, 0.003, 0.005))
    rule = only(judge(policy(Rule(metric="kl", max=1.0, against="floor")), run))
    # Both share the error rate: the figure at 97.5 %, and the floor widened to it with one degree of freedom.
    own = clustered_mean(SCORES.floats("kl"), SCORES.document, confidence=0.975)
    wide = 0.001 * t.ppf(0.9875, 1) / t.ppf(0.975, 1)
    wanted = (figure.value - 0.004, own.low - 0.004 - wide, own.high - 0.004 + wide)
    assert (rule.value, rule.low, rule.high) == pytest.approx(wanted)
    with pytest.raises(UsageError, match="--noise-floor"):
        judge(policy(Rule(metric="kl", max=1.0, against="floor")), RUN)
    with pytest.raises(UsageError, match="has no p99"):
        judge(policy(Rule(metric="kl", statistic="p99", max=1.0, against="floor")), run)


def test_a_rule_on_a_domain_subtracts_the_floor_of_that_domain():
    whole = floor_of(0.004, 0.003, 0.005)
    own = whole.model_copy(update={"domains": {"code": floor_of(0.001, 0.0009, 0.0011).figures}})
    rule = Rule(metric="kl", max=1.0, against="floor", slice={"by": "domain", "name": "code"})
    figure = only(judge(policy(Rule(metric="kl", max=1.0, slice={"by": "domain", "name": "code"})), RUN)).value
    assert only(judge(policy(rule), run_of(TABLE, noise=own))).value == pytest.approx(figure - 0.001)
    with pytest.raises(UsageError, match="no noise floor of domain code"):
        judge(policy(rule), run_of(TABLE, noise=whole))
    with pytest.raises(ValidationError, match="a slice by position has no noise floor"):
        Rule(metric="kl", max=1.0, against="floor", slice={"by": "position", "name": "4-7"})


@dataclass(frozen=True)
class Fixed:
    """A figure with a given interval at every confidence."""

    low: float
    high: float

    def settled(self, limits, *, confidence):
        return True

    def reservation(self, limits, *, confidence):
        return ""

    def figure(self, limits, *, confidence):
        return Figure((self.low + self.high) / 2, Interval(self.low, self.high, confidence))


def test_excess_of_metrics_that_should_be_high_or_zero():
    higher = Excess(Fixed(0.96, 0.98), Figure(0.995, Interval(0.99, 1.0, 0.975)), "higher", (0.0, 1.0))
    found = higher.figure(Limits(None, 0.1), confidence=0.95)
    assert (found.value, found.low, found.high) == pytest.approx((0.025, 0.01, 0.04))
    zero = Excess(Fixed(-0.3, 0.1), Figure(-0.05, Interval(-0.06, -0.04, 0.975)), "zero", (-math.inf, math.inf))
    found = zero.figure(Limits(None, 0.1), confidence=0.95)
    assert (found.value, found.low, found.high) == pytest.approx((0.1 - 0.05, 0.0 - 0.06, 0.3 - 0.04))


@dataclass(frozen=True)
class Normal:
    """A figure whose interval is the normal one around `value`, with standard error 1."""

    value: float

    def settled(self, limits, *, confidence):
        return True

    def reservation(self, limits, *, confidence):
        return ""

    def figure(self, limits, *, confidence):
        from scipy.special import ndtri

        z = float(ndtri(0.5 + confidence / 2))
        return Figure(self.value, Interval(self.value - z, self.value + z, confidence))


def rule_figures(values, limit):
    kl = get("kl")
    return [RuleFigure(Normal(v), Limits(None, limit), kl, kl.statistics[0], "exact", 10, 100) for v in values]


@given(values=st.lists(st.floats(-6, 6), min_size=1, max_size=7))
def test_holm_is_holm_on_p_values(values):
    from scipy.special import ndtr

    from tests.evalgate.stats.holm import holm

    decided = [d.verdict for d in decide(rule_figures(values, 0.0), confidence=0.9, correction="holm")]
    # Two-sided p-values: the interval at confidence 1 - p just touches the limit.
    passes = holm({str(i): min(1.0, 2 * float(ndtr(v))) for i, v in enumerate(values)})
    fails = holm({str(i): min(1.0, 2 * float(ndtr(-v))) for i, v in enumerate(values)})
    for i, verdict in enumerate(decided):
        gaps = [abs(passes[str(i)] - 0.1), abs(fails[str(i)] - 0.1)]
        if min(gaps) > 1e-9:
            wanted = "pass" if passes[str(i)] <= 0.1 else "fail" if fails[str(i)] <= 0.1 else "undecided"
            assert verdict == wanted


def test_holm_keeps_the_error_rate_of_many_rules():
    rng = np.random.default_rng(0)
    wrong = {"none": 0, "holm": 0}
    for _ in range(600):
        figures = rule_figures(rng.normal(0.0, 1, 8), 0.0)  # every true figure sits at its limit, or a hair above
        for correction in wrong:
            verdicts = [d.verdict for d in decide(figures, confidence=0.9, correction=correction)]
            wrong[correction] += "pass" in verdicts
    assert wrong["holm"] / 600 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 600)
    assert wrong["none"] / 600 > 0.2


def test_on_undecided_settles_the_whole_and_no_rule():
    limit = RUN.summary.comparisons[0].overall.metrics["kl"].statistics["mean"].value
    for setting, code in (("undecided", 3), ("fail", 1), ("pass", 0)):
        report = judge(policy(Rule(metric="kl", max=limit), on_undecided=setting), RUN)
        assert (report.verdict, report.exit_code, only(report).verdict) == (setting, code, "undecided")
        assert report.candidates[0].verdict == "undecided"


def test_the_worst_candidate_decides():
    table = token_table(("a", "b"), documents=12)
    kl = table.column("kl").to_numpy().copy()
    kl[len(kl) // 2 :] *= 100
    run = run_of(put(table, "kl", kl))
    report = judge(policy(Rule(metric="kl", max=0.2)), run)
    assert [c.verdict for c in report.candidates] == ["pass", "fail"]
    assert (report.verdict, report.exit_code) == ("fail", 1)
    assert judge(policy(Rule(metric="kl", max=0.2)), run, candidate="a").verdict == "pass"
    with pytest.raises(UsageError, match="no candidate 'c': use one of a, b"):
        judge(policy(Rule(metric="kl", max=0.05)), run, candidate="c")


LIMITS = (
    Rule(metric="kl", max=0.01),
    Rule(metric="kl", statistic="p99", max=0.1),
    Rule(metric="kl", max=0.0, name="kl is 0"),
    Rule(metric="top1_agreement", min=0.97),
    Rule(metric="flip", max=0.005),
    Rule(metric="regret", max=0.01),
    Rule(metric="topk_overlap", min=0.95),
    Rule(metric="nll", statistic="difference", min=-0.01, max=0.01),
    Rule(metric="perplexity", statistic="ratio", min=0.99, max=1.01),
    Rule(metric="delta_prob", statistic="rms", max=0.01),
    Rule(metric="greedy_match_length", min=5.0),
)


def test_a_candidate_that_is_its_reference_is_never_failed():
    rng = np.random.default_rng(0)
    for trial in range(200):
        documents = int(rng.integers(1, 80))
        run = run_of_identical(documents)
        report = judge(policy(*LIMITS, correction=("none", "holm")[trial % 2], clip=(None, 10)[trial // 2 % 2]), run)
        assert report.verdict != "fail", report
        by_name = {r.rule: r.verdict for r in report.candidates[0].rules}
        assert by_name["kl is 0"] == "undecided"
        if trial % 2 == 0:
            # Without a clip the rare-event bound decides, with one the bets.
            least = 36 if trial // 2 % 2 == 0 else 44
            assert (by_name["kl mean <= 0.01"] == "pass") == (documents >= least), documents


_IDENTICAL: dict[int, Run] = {}


def run_of_identical(documents):
    # One table per size; the summary is only read for names and the noise floor, so it is made once.
    if documents not in _IDENTICAL:
        table = identical(documents)
        _IDENTICAL[documents] = Run(summary=IDENTICAL_SUMMARY, table=table, manifest={})
    return _IDENTICAL[documents]


IDENTICAL_SUMMARY = summary(identical(4), reference=REFERENCE)


def test_an_identical_candidate_passes_where_the_policy_clips():
    report = judge(
        policy(*(r for r in LIMITS if r.name is None and r.metric != "greedy_match_length"), clip=10),
        run_of_identical(64),
    )
    assert report.verdict == "pass", [r for r in report.candidates[0].rules if r.verdict != "pass"]


def test_a_change_of_nothing_against_the_baseline_passes():
    run = run_of_identical(64)
    report = judge(policy(Rule(metric="kl", max=0.001, against="baseline")), run, baseline=run)
    assert report.verdict == "pass"
    with pytest.raises(UsageError, match="give max"):
        judge(policy(Rule(metric="kl", max_ratio=1.1, against="baseline")), run, baseline=run)


def test_a_metric_the_run_does_not_have_is_named():
    alone = token_table(("demo",), pair=False, documents=16)
    run = Run(summary=summary(alone, kind="ppl"), table=alone, manifest={})
    with pytest.raises(UsageError, match=r"rule 'kl mean <= 0.01': kl cannot be judged"):
        judge(policy(Rule(metric="kl", max=0.01)), run)
    ratio = policy(Rule(metric="perplexity", statistic="ratio", max=1.1))
    with pytest.raises(UsageError, match="needs a reference"):
        judge(ratio, run)
    assert judge(policy(Rule(metric="perplexity", statistic="candidate", max=1e9)), run).verdict == "pass"
