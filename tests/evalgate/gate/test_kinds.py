"""Kinds of rules: each is one file, and one that claims only its fails takes no share of the error rate of passes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from evalgate.core import Figure, Interval, Limits
from evalgate.errors import UsageError
from evalgate.gate import kinds
from evalgate.gate.family import decide
from evalgate.gate.figures import RuleFigure
from evalgate.gate.foresight import check_parts, check_sources
from evalgate.gate.judge import judge
from evalgate.gate.kinds import Sources
from evalgate.gate.policy import Policy, Rule, advice, parse_policy
from evalgate.metrics import get, registry
from tests.evalgate.gate.test_judge import RUN, TABLE, Normal, only, policy, put, rule_figures, run_of
from tests.evalgate.sample_run import token_table

REGRESSION = Rule(metric="kl", against="regression")


def shifted(by, name="kl", table=TABLE):
    """A run whose metric lies higher by about so much at each position, as a baseline."""
    values = np.asarray(table.column(name), dtype=float) + by
    return run_of(put(table, name, values * np.random.default_rng(1).uniform(0.98, 1.02, len(values))))


@pytest.mark.parametrize(
    ("by", "margin", "verdict", "said"),
    [
        (-0.005, None, "fail", "is worse than what is tolerated"),
        (-0.005, 0.01, "pass", "the whole interval is on the tolerated side"),
        (0.0, None, "pass", "worse is not excluded"),
        (0.005, None, "pass", "the whole interval is on the tolerated side"),
    ],
)
def test_a_regression_fails_only_where_worse_is_proven(by, margin, verdict, said):
    rule = only(judge(policy(Rule(metric="kl", against="regression", max=margin)), RUN, baseline=shifted(by)))
    assert rule.verdict == verdict and said in rule.reason
    assert rule.proven == (verdict == "fail")


def test_worse_is_the_side_that_the_metric_says():
    better = put(TABLE, "cand_top1", np.asarray(TABLE.column("ref_top1")))
    rule = policy(Rule(metric="top1_agreement", against="regression"))
    assert only(judge(rule, RUN, baseline=run_of(better))).verdict == "fail"
    assert only(judge(rule, run_of(better), baseline=RUN)).verdict == "pass"
    with pytest.raises(UsageError, match="has no direction that is worse"):
        parse_policy('[[rules]]\nmetric = "delta_logprob"\nagainst = "regression"\n', name="p")


def test_the_same_model_is_no_regression_and_one_document_shows_none():
    assert only(judge(policy(REGRESSION), RUN, baseline=RUN)).verdict == "pass"
    one = token_table(("demo@int8",), documents=1)
    report = judge(policy(REGRESSION), run_of(one), baseline=shifted(-0.005, table=one))
    assert only(report).verdict == "undecided" and "gives no interval" in only(report).reason


def test_a_percentile_that_looks_worse_without_a_proof_is_undecided():
    rule = Rule(metric="kl", statistic="p99.9", against="regression")
    assert only(judge(policy(rule), RUN, baseline=shifted(-0.005))).verdict == "undecided"
    assert only(judge(policy(rule), RUN, baseline=shifted(0.005))).verdict == "pass"


def regression_figures(values):
    kl = get("kl")
    kind = kinds.get("regression")
    return [RuleFigure(Normal(v), Limits(None, 0.0), kl, kl.statistics[0], "exact", 10, 100, kind) for v in values]


def test_rules_against_regression_share_the_error_rate_of_fails():
    """Candidates that are as good as their baseline, eight rules each: any fail is wrong."""
    rng = np.random.default_rng(0)
    wrong = {"none": 0, "holm": 0}
    for _ in range(600):
        figures = regression_figures(rng.normal(0.0, 1, 8))
        for correction in wrong:
            verdicts = [d.verdict for d in decide(figures, confidence=0.9, correction=correction)]
            assert set(verdicts) <= {"pass", "fail"}
            wrong[correction] += "fail" in verdicts
    assert wrong["holm"] / 600 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 600)
    assert wrong["none"] / 600 > 0.2


def test_they_take_no_share_of_the_error_rate_of_passes():
    """One limit that passes alone at 90 % passes beside eight rules that claim no pass, and not beside eight limits."""
    limit = rule_figures([-1.8], 0.0)  # 1.8 standard errors inside: enough for 90 %, not for a ninth of 10 %
    beside = decide([*limit, *regression_figures([0.0] * 8)], confidence=0.9, correction="holm")
    assert [d.verdict for d in beside] == ["pass"] * 9
    assert decide([*limit, *rule_figures([0.0] * 8, 0.0)], confidence=0.9, correction="holm")[0].verdict == "undecided"
    # All of them may fail, so a fail of the limit is held against all nine.
    worse = rule_figures([1.8], 0.0)
    assert decide(worse, confidence=0.9, correction="holm")[0].verdict == "fail"
    assert decide([*worse, *regression_figures([0.0] * 8)], confidence=0.9, correction="holm")[0].verdict == "undecided"


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ('against = "regression"\nmin = 0.1', "takes max only"),
        ('against = "regression"\nmax = -0.1', "asks for an improvement"),
        ('against = "regresion"', "there is no 'regresion': did you mean regression?"),
        ('against = "limit"', "has no limit"),
    ],
)
def test_keys_of_kinds(keys, part):
    with pytest.raises(UsageError) as caught:
        parse_policy(f'[[rules]]\nmetric = "kl"\n{keys}\n', name="p")
    assert part in caught.value.message


def test_each_rule_says_what_undecided_counts_as():
    limit = RUN.summary.comparisons[0].overall.metrics["kl"].statistics["mean"].value
    at = Rule(metric="kl", max=limit)
    lenient = Rule(metric="kl", max=limit, name="lenient", on_undecided="pass")
    for rules, settings, code in (
        ([lenient], {}, 0),
        ([at, lenient], {}, 3),
        ([at, lenient], {"on_undecided": "fail"}, 1),
        ([at.model_copy(update={"on_undecided": "fail"})], {"on_undecided": "pass"}, 1),
    ):
        report = judge(policy(*rules, **settings), RUN)
        assert report.exit_code == code, (rules, settings)
        assert {r.verdict for r in report.candidates[0].rules} == {"undecided"}


def test_without_a_baseline_its_rules_are_not_applicable_where_the_policy_says_so():
    with pytest.raises(UsageError, match="--baseline"):
        judge(policy(REGRESSION), RUN)
    report = judge(policy(REGRESSION, Rule(metric="kl", max=1.0), baseline="optional", correction="holm"), RUN)
    assert [r.verdict for r in report.candidates[0].rules] == ["not applicable", "pass"]
    assert (report.verdict, report.exit_code) == ("pass", 0)
    assert report.candidates[0].rules[1].confidence == 0.95  # alone in its family
    assert judge(policy(REGRESSION, baseline="optional"), RUN).verdict == "pass"
    worse = judge(policy(REGRESSION, baseline="optional"), RUN, baseline=shifted(-0.005))
    assert worse.verdict == "fail"


@pytest.mark.parametrize(
    ("rule", "part"),
    [
        ({"metric": "kl", "against": "baseline", "max": 0.0}, 'write against = "regression"'),
        ({"metric": "top1_agreement", "against": "baseline", "min": 0.0}, 'write against = "regression"'),
        ({"metric": "kl", "against": "baseline", "max_ratio": 1.0}, 'write against = "regression"'),
        ({"metric": "kl", "max": 0.0}, "never passes"),
        ({"metric": "top1_agreement", "min": 1.0}, "never passes"),
    ],
)
def test_what_is_hardly_meant_is_said(rule, part):
    (said,) = advice(policy(Rule.model_validate(rule)))
    assert part in said


def test_what_is_meant_gets_no_advice():
    rules = (
        Rule(metric="kl", max=0.01),
        Rule(metric="kl", against="baseline", max=0.001),
        Rule(metric="kl", against="regression"),
        Rule(metric="nll", statistic="difference", max=0.0),
    )
    assert advice(policy(*rules)) == []


REMOTE = Sources(remote="http://h/v1#m")


@pytest.mark.parametrize(
    ("rule", "part"),
    [
        ({"metric": "kl", "max": 0.01}, 'write metric = "js" or "tv"'),
        ({"metric": "kl", "statistic": "p99", "max": 0.01}, "lower bound only"),
        ({"metric": "reverse_kl", "max": 0.01}, "whole distributions"),
        ({"metric": "kl", "max": 0.01, "against": "floor"}, "the noise floor of the endpoint"),
        ({"metric": "js", "against": "regression"}, "two bounds have no difference"),
        ({"metric": "kl", "max": 0.01, "against": "baseline"}, "two bounds have no difference"),
    ],
)
def test_rules_that_an_endpoint_cannot_pass_are_refused_before_it_is_asked(rule, part):
    one = policy(Rule.model_validate(rule))
    with pytest.raises(UsageError) as caught:
        check_sources(one, REMOTE)
    assert part in caught.value.message and "http://h/v1#m" in caught.value.message
    check_sources(one, Sources())


def test_rules_that_an_endpoint_can_settle_are_let_through():
    fine = policy(
        Rule(metric="js", max=0.01),
        Rule(metric="kl", statistic="mean_low", max=0.01),
        Rule(metric="kl", min=0.01),
        Rule(metric="kl", max=0.02, on_undecided="pass"),
        Rule(metric="nll", statistic="difference", against="regression"),
    )
    check_sources(fine, REMOTE)
    check_sources(policy(Rule(metric="kl", max=0.01)), Sources(remote="http://h", recorded=True))


def test_what_metrics_say_of_endpoints_is_what_an_endpoint_gives():
    """`Metric.listed` against the columns that are made of two lists of likeliest tokens."""
    from evalgate.measure.bounds import narrowed, pair_columns, wide_table
    from evalgate.metrics import split_candidates
    from tests.evalgate.measure.test_bounds import answers, distributions, window_of

    window = window_of(4)
    sides = [answers(window, distributions(seed, 4, 2.0), 12) for seed in (0, 1)]
    columns = pair_columns(window, *sides, by_id=(True, True))
    (scores,) = split_candidates(narrowed(wide_table(window, {"c": columns})), noise_floor=1e-6)
    for metric in registry().values():
        form = metric.exactness(scores)
        found = set(metric.series(scores)) if form else set()
        if metric.listed == "none":
            assert form is None, metric.name
        elif metric.listed == "lower":
            assert found == {"low"}, metric.name
        elif metric.listed == "interval":
            assert found == {"low", "high"}, metric.name
        elif metric.name not in ("topk_overlap", "regret"):  # they depend on how long the lists are
            assert form == "exact", metric.name


def test_parts_that_the_text_does_not_have_are_named():
    rules = policy(Rule(metric="kl", max=1.0, slice={"by": "domain", "name": "poetry"}))
    with pytest.raises(UsageError, match="has no domain 'poetry': use one of code, prose"):
        check_parts(rules, "domain", {"prose", "code"})
    check_parts(rules, "document", {"a"})
    check_parts(rules, "domain", {"poetry"})


NEW_KIND = """
from evalgate.gate.kinds import RuleKind


class _Doubled(RuleKind):
    name = "doubled"
    needs = "floor"  # any need: it is sorted behind the limit

    def figure(self, name, rule):
        return f"{name} doubled"

    def measure(self, rule, maker):
        return maker.plain()

    def limits(self, rule, metric):
        from evalgate.core import Limits

        return Limits(None, 2 * rule.max)


KIND = _Doubled()
"""


def test_a_kind_of_rule_is_one_file(tmp_path, monkeypatch):
    (tmp_path / "doubled.py").write_text(NEW_KIND)
    monkeypatch.setattr(kinds, "__path__", [*kinds.__path__, str(tmp_path)])
    one = parse_policy('[[rules]]\nmetric = "kl"\nagainst = "doubled"\nmax = 0.5\n', name="p")
    assert one.rules[0].text == "kl mean doubled <= 0.5" and one.needs_floor
    rule = only(judge(one, RUN))
    assert (rule.verdict, rule.max, rule.figure) == ("pass", 1.0, "kl mean doubled")


@dataclass(frozen=True)
class _Open:
    """A figure whose interval is open below."""

    def figure(self, limits: Limits, *, confidence: float) -> Figure:
        return Figure(0.5, Interval(None, 1.0, confidence, "m"))

    def settled(self, limits: Limits, *, confidence: float) -> bool:
        return True

    def reservation(self, limits: Limits, *, confidence: float) -> str:
        return ""


def test_an_open_end_proves_nothing_either_way():
    kind = kinds.get("regression")
    measure = _Open()
    found = measure.figure(Limits(), confidence=0.95)
    assert kind.verdict(measure, Limits(None, 0.0), found) == "undecided"
    assert kind.verdict(measure, Limits(None, 0.6), found) == "pass"
    assert isinstance(policy(REGRESSION), Policy)
