"""A report is one file: one that is added in a folder of its own is printed, written, completed and named in help."""

from __future__ import annotations

import subprocess
import sys

import pytest

from evalgate import reports
from evalgate.errors import UsageError
from evalgate.store.runs import write_run
from tests.evalgate.sample_run import source, summary, token_table

SUMMARY = """
from evalgate.reports import Report

def render(document):
    return f"{document.kind} of {len(document.comparisons)} candidates\\n"

REPORT = Report("summary", render)
"""
GATE = """
from evalgate.reports import Report

def render(document):
    return f"the verdict is {document.verdict}\\n"

REPORT = Report("gate", render, file="Write one line about the verdict.")
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A folder with the reports `made_up` of a run and `one_line` of the gate, and a stored run."""
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "made_up.py").write_text(SUMMARY)
    (folder / "one_line.py").write_text(GATE)
    table = token_table(("demo@int8",), documents=24)
    write_run(tmp_path / "run", manifest={}, table=table, summary=summary(table, reference=source("demo")))
    monkeypatch.chdir(tmp_path)
    return folder


def evalgate(folder, *args):
    code = (
        f"import sys\nfrom evalgate import reports; reports.__path__.append({str(folder)!r})\n"
        f"from evalgate.cli import main\nsys.exit(main({list(args)!r}))"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_a_report_of_a_run_is_printed_and_named(made):
    assert evalgate(made, "show", "run", "--format", "made_up").stdout == "kl of 1 candidates\n"
    unknown = evalgate(made, "show", "run", "--format", "other")
    assert unknown.returncode == 2
    assert unknown.stderr == (
        "evalgate: there is no report 'other' of a summary: use one of screen, terminal, csv, json, made_up, markdown\n"
    )
    assert "made_up" in evalgate(made, "show", "--help").stdout


def test_a_report_of_the_gate_is_written_where_its_option_says(made, tmp_path):
    options = ("gate", "--policy", "8bit", "--run", "run", "--no-github", "--one-line", "line.txt")
    (tmp_path / "p.toml").write_text('[policy]\nnoise_floor = false\n[[rules]]\nmetric = "kl"\nmax = 9\n')
    done = evalgate(made, *options[:2], "p.toml", *options[3:])
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "line.txt").read_text() == "the verdict is pass\n"
    shown = evalgate(made, "gate", "--help").stdout
    assert "--one-line" in shown and "--junit" in shown


def test_every_kind_of_document_has_a_report_and_names_lead_to_it():
    for document in ("summary", "gate", "compare", "plan", "slices"):
        assert reports.of(document)
        for name, report in reports.of(document).items():
            assert reports.get(document, name) is report
    assert list(reports.of("summary")) == ["screen", "terminal", "csv", "json", "markdown"]
    assert [name for name, report in reports.of("gate").items() if report.file] == ["badge", "comment", "junit"]
    with pytest.raises(UsageError, match="no report 'badge' of a summary: use one of screen, terminal, csv"):
        reports.get("summary", "badge")


def test_the_text_of_a_run_is_its_block_or_its_document():
    table = token_table(("demo@int8",))
    document = summary(table, reference=source("demo"))
    assert "Mean KLD" in reports.get("summary", "terminal").text(document, width=100)
    assert reports.get("summary", "json").text(document).startswith("{")
