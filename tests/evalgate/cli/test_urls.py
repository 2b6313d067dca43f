"""Commands that read a run take its URL; those that cannot refuse one by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from evalgate.cli.app import invoke
from evalgate.store.remote import Url
from evalgate.store.runs import write_run
from tests.evalgate.cli.test_cli import MemoryOutput
from tests.evalgate.sample_run import source, summary, token_table

RUN = "memory://team/a run"


@pytest.fixture(autouse=True)
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    table = token_table(("demo@int8",))
    write_run(Url(RUN), manifest={}, table=table, summary=summary(table, reference=source("demo")))
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


Called = Callable[..., tuple[int, str, str]]


@pytest.fixture
def called(capsys: pytest.CaptureFixture[str]) -> Called:
    """Exit code, document and messages of a command line."""

    def call(*words: str) -> tuple[int, str, str]:
        output = MemoryOutput()
        code = invoke(list(words), output)
        return code, output.text, capsys.readouterr().err

    return call


def test_commands_that_read_a_run_take_a_url(called: Called) -> None:
    code, text, _ = called("show", RUN)
    assert code == 0 and RUN in text
    code, text, _ = called("show", RUN, "--json")
    assert code == 0 and json.loads(text)["comparisons"]
    assert called("slices", RUN)[0] == 0
    code, text, _ = called("gate", "--run", RUN, "--max", "kl=100", "--json")
    assert code in (0, 3) and json.loads(text)["run"] == RUN
    code, _, said = called("gate", "--run", "memory://team/none", "--max", "kl=1")
    assert code == 2 and "there is no run folder memory://team/none" in said


@pytest.mark.parametrize(
    "words",
    [
        ("view", RUN),
        ("sweep", "--ref", "demo", "--cand", "demo@int8", "--out", "memory://team/sweep"),
        ("show", RUN, "--html", "memory://team/report.html"),
        ("trace", "cut", "memory://team/a.trace", "--positions", "1", "--out", "memory://team/b.trace"),
        ("record", "--ref", "demo", "--out", "memory://team/x.bin", "--format", "llama.cpp", "--windows", "llama.cpp"),
    ],
)
def test_what_is_kept_on_this_machine_refuses_a_url(called: Called, words: tuple[str, ...], tmp_path: Path) -> None:
    code, text, said = called(*words)
    assert code == 2 and "is a URL" in said and not text
    assert not (tmp_path / "memory:").exists()


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(called: Called) -> None:
    for word in ("nope://b/run", "s3://"):
        code, _, said = called("kl", "--ref", "demo", "--cand", "demo@int8", "--out", word)
        assert code == 2 and word.partition(":")[0] in said
    code, _, said = called("kl", "--ref", "demo", "--cand", "demo@int8", "--out", RUN)
    assert code == 2 and "already holds a run folder" in said
