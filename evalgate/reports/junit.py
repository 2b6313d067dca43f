"""JUnit XML of a gate: a suite per candidate, a case per rule, so that any CI lists what failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evalgate.core import NOT_APPLICABLE
from evalgate.printable import printable
from evalgate.reports import Report
from evalgate.reports._verdicts import rule_text

if TYPE_CHECKING:
    from evalgate.gate.report import GateReport, RuleVerdict


def render(report: GateReport) -> str:
    """The XML document. fail = failure; undecided = error, or what the policy's on_undecided makes of it.

    A rule that is not applicable is skipped. Where nothing could be measured, the one case is an error.
    """
    from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

    document = JUnitXml(f"evalgate {_xml(report.policy)}")
    if report.error is not None:
        suite = TestSuite(_xml(f"evalgate {report.policy}"))
        suite.timestamp = report.created
        case = TestCase(report.verdict, classname="evalgate")
        case.result = [Error(_xml(report.error.message), _xml(report.error.type))]
        suite.add_testcase(case)
        document.add_testsuite(suite)
    for candidate in report.candidates:
        suite = TestSuite(_xml(candidate.candidate))
        suite.timestamp = report.created
        for name, value in (
            ("policy_hash", report.policy_hash),
            ("reference", report.reference or ""),
            ("corpus", report.corpus),
            ("confidence", str(report.confidence)),
        ):
            suite.add_property(name, _xml(value))
        for rule in candidate.rules:
            case = TestCase(_xml(rule.rule), classname=_xml(f"evalgate.{candidate.candidate}"))
            case.system_out = _xml(_figures(rule))
            verdict = rule.counts_as
            if rule.verdict == NOT_APPLICABLE:
                case.result = [Skipped(_xml(rule.reason))]
            elif verdict == "fail":
                case.result = [Failure(_xml(rule.reason), rule.verdict)]
            elif verdict == "undecided":
                case.result = [Error(_xml(rule.reason), rule.verdict)]
            suite.add_testcase(case)
        document.add_testsuite(suite)
    document.update_statistics()
    text: str = document.tostring().decode("utf-8")
    return text if text.endswith("\n") else text + "\n"


def _figures(rule: RuleVerdict) -> str:
    text = rule_text(rule)
    return f"{rule.verdict}: {rule.figure} {text.value} {text.interval}, limit {text.limit}; {rule.reason}"


def _xml(text: str) -> str:
    """Text that XML 1.0 can hold: control characters and lone surrogates are escaped."""
    return printable(text)


REPORT = Report("gate", render, file="Write the verdicts as JUnit XML.")
