"""`evalgate show --html`, and the page that a measurement and a gate leave in the run folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from evalgate.cli.app import invoke
from evalgate.measure import run as measure
from evalgate.measure.page import PAGE
from evalgate.measure.request import RunRequest
from evalgate.reports import html
from evalgate.store.runs import Run, read_run, write_run
from tests.evalgate import fake_pipeline
from tests.evalgate.cli.test_cli import MemoryOutput
from tests.evalgate.sample_run import source, summary, token_table

GATE = ["gate", "--ref", "demo", "--cand", "demo@int8", "-q", "--out", "run"]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "evalgate.measure.run", fake_pipeline.module())


@pytest.fixture
def stored(tmp_path: Path) -> Run:
    table = token_table(("c",))
    return write_run(tmp_path / "r", manifest={}, table=table, summary=summary(table, reference=source("demo")))


def call(*args: str) -> tuple[int, str]:
    output = MemoryOutput()
    return invoke(args, output), output.text


def test_show_writes_a_page(stored: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("show", "r", "--html", "page.html") == (0, "")
    assert "report: page.html" in capsys.readouterr().err
    assert Path("page.html").read_text(encoding="utf-8") == html.render(read_run(Path("r")))


def test_show_prints_a_page(stored: Run) -> None:
    code, text = call("show", "r", "--format", "html")
    assert code == 0 and text.startswith("<!doctype html>") and text.rstrip().endswith("</html>")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--json"], "--html writes a file and 'json' prints"),
        (["--format", "html"], "--html writes a file and 'html' prints"),
    ],
)
def test_show_refuses_two_documents(
    stored: Run, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    assert call("show", "r", "--html", "page.html", *more)[0] == 2
    assert said in capsys.readouterr().err and not Path("page.html").exists()


def test_a_page_that_cannot_be_written_is_said_first(stored: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("show", "nowhere", "--html", "no/folder/page.html")[0] == 2
    assert "there is no folder for no/folder/page.html" in capsys.readouterr().err


@pytest.mark.parametrize(("limit", "verdict", "code"), [("0.9", "pass", 0), ("0.0001", "fail", 1)])
def test_a_gate_leaves_its_verdict_in_the_run_it_measured(limit: str, verdict: str, code: int) -> None:
    assert call(*GATE, "--max", f"kl={limit}")[0] in {code, 3}
    page = Path("run", PAGE).read_text(encoding="utf-8")
    assert f"<strong>{verdict}</strong>" in page or "<strong>undecided</strong>" in page
    assert PAGE not in read_run(Path("run")).manifest["files"]


def test_a_gate_that_cannot_judge_leaves_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evalgate.gate.judge.judge", lambda *_, **__: 1 / 0)
    assert call(*GATE, "--max", "kl=1")[0] == 2
    assert "<strong>" not in Path("run", PAGE).read_text(encoding="utf-8")


class _Said:
    def __init__(self) -> None:
        self.said: list[str] = []

    def stage(self, text: str) -> None:
        self.said.append(text)


def test_a_measured_run_is_kept_whatever_its_page_does(stored: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> str:
        raise RuntimeError("no luck")

    monkeypatch.setattr(measure, "carry_out", lambda *_: stored)
    monkeypatch.setattr(measure, "measurement_of", lambda *_: None)
    monkeypatch.setattr(html, "render", broken)
    watch, request = _Said(), RunRequest.of("kl", "demo", ["demo@int8"])
    assert measure.run(request, observer=watch) is stored  # type: ignore[arg-type]
    again = f"`evalgate show {stored.folder} --html FILE` makes one, or shows what is wrong"
    assert watch.said == [f"no report.html was written (RuntimeError: no luck): {again}"]
    assert measure.run(request, observer=watch, page=False) is stored and len(watch.said) == 1  # type: ignore[arg-type]
    monkeypatch.undo()
