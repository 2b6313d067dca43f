"""The gate's reports: what CI systems read, from fabricated verdicts."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
from junitparser import JUnitXml

from evalgate.gate.report import CandidateVerdict, Change, GateReport, RuleVerdict, Stopped
from evalgate.reports import badge, comment, github, junit, verdict


def rule(name="kl mean <= 0.01", verdict="pass", **changes):
    values = {
        "rule": name,
        "text": name,
        "figure": "kl mean",
        "metric": "kl",
        "statistic": "mean",
        "unit": "nats",
        "verdict": verdict,
        "reason": "because",
        "value": 0.0012,
        "low": 0.001,
        "high": 0.0014,
        "confidence": 0.95,
        "method": "clustered-t",
        "min": None,
        "max": 0.01,
        "exactness": "exact",
        "documents": 12,
        "positions": 360,
    }
    return RuleVerdict.model_validate({**values, **changes})


def report(*rules, **changes):
    order = ("pass", "undecided", "fail")
    whole = max((r.verdict for r in rules), key=order.index)
    values = {
        "evalgate_version": "0.1.0",
        "created": "2026-01-02T03:04:05+00:00",
        "policy": "release",
        "policy_hash": "0123456789abcdef",
        "confidence": 0.95,
        "correction": "none",
        "on_undecided": "undecided",
        "verdict": whole,
        "exit_code": {"pass": 0, "fail": 1, "undecided": 3}[whole],
        "reference": "demo",
        "baseline": None,
        "run": "runs/x",
        "corpus": "builtin",
        "documents": 12,
        "positions": 360,
        "candidates": [CandidateVerdict(candidate="demo@int8", verdict=whole, rules=list(rules))],
    }
    return GateReport.model_validate({**values, **changes})


MIXED = report(rule(), rule("b", "fail"), rule("c", "undecided"))
HOSTILE = "a|b\n<script>@all `x` [l](u) \x1b[31m\x00 %0A::error::x"


def test_the_block_says_everything_and_why():
    text = verdict.render(MIXED, width=80)
    assert text.startswith("====== evalgate gate: FAIL ======")
    assert text.splitlines()[-1] == "fail: 1 of 3 rules pass, 1 fail, 1 undecided"
    assert text.count("because") == 2  # passes need no reason
    assert "0.00120 [0.00100, 0.00140]  limit <= 0.01" in text
    assert "\x1b" not in text and "\x1b[31m" in verdict.render(MIXED, color=True)


def test_an_undecided_gate_that_the_policy_settles_says_so():
    settled = report(rule(verdict="undecided"), on_undecided="pass", verdict="pass", exit_code=0)
    assert verdict.render(settled).splitlines()[-1] == "pass by on_undecided: 0 of 1 rules pass, 1 undecided"


def test_units_bounds_changes_and_stopping_are_shown():
    change = Change(
        metric="top1_agreement",
        statistic="mean",
        unit="fraction",
        better="higher",
        value=0.97,
        baseline=0.96,
        difference=0.01,
        low=0.005,
        high=0.015,
    )
    half = rule("bounds", value=None, high=None, unit="fraction", max=None, min=0.0005)
    whole = report(half, baseline="runs/before", sequential=Stopped(documents=9, of=64, seed=3), notes=["a note"])
    whole.candidates[0].changes.append(change)
    text = verdict.render(whole)
    assert "bounded [0.10000, open)%  limit >= 0.05%" in text
    assert re.search(r"top1_agreement mean +97\S*% +96\S*% +\+1\S*% \[0.50, 1.50\]%", text)
    assert "after 9 of 64 documents, order of seed 3" in text and "a note" in text
    assert "| top1\\_agreement mean | 97" in comment.render(whole)


def test_what_the_run_found_opens_every_report():
    said = "mean KL 0.0012 [0.0010, 0.0014]: about 40 times the noise floor"
    document = report(rule(), rule("b", "fail"))
    document = document.model_copy(
        update={"candidates": [document.candidates[0].model_copy(update={"headline": said})]}
    )
    assert verdict.render(document).index(said) < verdict.render(document).index("kl mean")
    markdown = comment.render(document)
    assert markdown.index("#### ") < markdown.index("mean KL 0.0012") < markdown.index("| rule |")
    assert github.workflow_commands(document).splitlines()[0] == f"::notice title=evalgate%3A demo@int8::{said}"


def test_control_characters_cannot_steer_a_terminal():
    text = verdict.render(report(rule(HOSTILE, "fail", reason=HOSTILE)))
    assert "\x1b" not in text and "\x00" not in text


@pytest.mark.parametrize(("on_undecided", "failures", "errors"), [("undecided", 1, 1), ("fail", 2, 0), ("pass", 1, 0)])
def test_junit(on_undecided, failures, errors):
    text = junit.render(report(rule(), rule("b", "fail"), rule("c", "undecided", on_undecided=on_undecided)))
    parsed = JUnitXml.fromstring(text.encode())
    assert (parsed.tests, parsed.failures, parsed.errors) == (3, failures, errors)
    (suite,) = parsed
    assert suite.name == "demo@int8"
    cases = {case.name: case for case in suite}
    assert cases["b"].result[0].message == "because"
    assert not cases["kl mean <= 0.01"].result


def test_junit_is_xml_whatever_the_names():
    text = junit.render(report(rule(HOSTILE + "\ud800\uffff", "fail", reason=HOSTILE), policy=HOSTILE))
    assert ElementTree.fromstring(text).tag == "testsuites"


def test_github_commands_are_one_line_each_and_few():
    commands = github.workflow_commands(MIXED).splitlines()
    assert [c.split(" ")[0] for c in commands] == ["::error", "::warning"]
    hostile = github.workflow_commands(report(rule(HOSTILE, "fail"))).splitlines()
    assert len(hostile) == 1 and "%0A" in hostile[0] and "%250A" in hostile[0]
    many = github.workflow_commands(report(*(rule(f"r{i}", "fail") for i in range(30)))).splitlines()
    assert len(many) == 10 and "21 more rules" in many[-1]
    assert github.workflow_commands(report(rule())).startswith("::notice title=evalgate::pass: 1 of 1")
    assert github.outputs(MIXED).splitlines() == [
        "verdict=fail",
        "exit-code=1",
        "headline=fail: 1 of 3 rules pass, 1 fail, 1 undecided",
    ]


def test_a_comment_is_found_again_and_cannot_be_steered():
    text = comment.render(MIXED)
    assert text.splitlines()[0] == comment.marker(MIXED) == "<!-- evalgate: release -->"
    other = report(rule(HOSTILE, "fail", reason=HOSTILE), policy="x --> <img>", reference=HOSTILE)
    text = comment.render(other)
    first, rest = text.split("\n", 1)
    assert first.startswith("<!--") and first.count("--") == 2 and first.endswith("-->")
    assert "<" not in rest and "@all" not in rest and "`x`" not in rest
    rows = [line for line in rest.splitlines() if line.startswith("|")]
    assert all(line.count("|") == 6 for line in rows)


def test_a_comment_fits():
    big = report(*(rule(f"rule {i} " + "é" * 200, "fail") for i in range(500)))
    text = comment.render(big)
    assert len(text.encode()) <= 64_000 and "Cut to fit" in text
    assert len(comment.render(big, max_bytes=1_000_000).encode()) > 64_000


def test_badge():
    body = json.loads(badge.render(report(rule())))
    assert body == {
        "schemaVersion": 1,
        "label": "evalgate release",
        "message": "pass, KL 0.0012000",
        "color": "brightgreen",
    }
    assert json.loads(badge.render(MIXED))["color"] == "red"
    tail = rule("p99", figure="kl p99", statistic="p99")
    assert json.loads(badge.render(report(tail)))["message"] == "pass"
