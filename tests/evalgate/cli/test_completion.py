"""Completion as bash, zsh and fish ask for it: through the variables that their scripts set."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from evalgate import corpora, dialects, reports
from evalgate.metrics import registry
from tests.evalgate.cli.test_cli import call
from tests.stuck import STUCK


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with something of everything that can be named."""
    monkeypatch.chdir(tmp_path)
    for name in ("runs/kl-1", "runs/other", "kl-2", "texts", "ref.trace", "swept"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "swept" / "sweep.json").touch()
    for run in ("runs/kl-1", "kl-2"):
        for file in ("manifest.json", "tokens.parquet"):
            (tmp_path / run / file).touch()
    for file in ("model.gguf", "policy.toml", "notes.txt", "rows.jsonl.gz", "photo.png", ".hidden.txt"):
        (tmp_path / file).touch()
    return tmp_path


def asked(shell, line, monkeypatch, capsys, **variables):
    """What the shell is told for a line whose last word is being typed."""
    words = line.split(" ")
    set_by = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    for name, value in {"_EVALGATE_COMPLETE": f"complete_{shell}", **set_by, **variables}.items():
        monkeypatch.setenv(name, value)
    capsys.readouterr()
    assert call()[0] in (0, 2)
    out = capsys.readouterr().out
    if shell == "zsh":
        return [word.replace("\\\\:", ":") for word in re.findall(r'^(?:.*\(\()?"([^"]*)"', out, re.MULTILINE)]
    return [row.split("\t")[0] for row in out.splitlines() if row]


CASES = [
    ("evalgate kl --ref ", {"demo", "llama.cpp:", "model.gguf", "ref.trace", "runs/", "texts/", "kl-2/", "swept/"}),
    ("evalgate kl --cand demo@b", {"demo@bf16"}),
    ("evalgate ppl --model llama.cpp:m", {"llama.cpp:model.gguf"}),
    (
        "evalgate kl --data ",
        {*corpora.names(), "notes.txt", "rows.jsonl.gz", "runs/", "texts/", "kl-2/", "ref.trace/", "swept/"},
    ),
    ("evalgate kl --windows ", {"disjoint", "sliding", "llama.cpp", "lm-eval"}),
    ("evalgate kl --device cu", {"cuda", "cuda:0", "cuda:1"}),
    ("evalgate kl --dialect ", set(dialects.names())),
    ("evalgate verify --ref demo --cand llama", {"llama.cpp:"}),
    (
        "evalgate gate --policy ",
        {"lossless", "8bit", "4bit", "policy.toml", "runs/", "texts/", "kl-2/", "ref.trace/", "swept/"},
    ),
    ("evalgate gate --max kl", {"kl="}),
    ("evalgate gate --baseline ", {"runs/kl-1", "kl-2", "runs/", "texts/", "ref.trace/", "swept/"}),
    ("evalgate policy init --preset ", {"lossless", "8bit", "4bit"}),
    ("evalgate show ", {"kl-2", "runs/", "texts/", "ref.trace/", "swept"}),
    ("evalgate view kl-2 s", {"swept"}),
    ("evalgate slices ", {"runs/kl-1", "kl-2", "runs/", "texts/", "ref.trace/", "swept/"}),
    ("evalgate show runs/", {"runs/kl-1", "runs/other/"}),
    ("evalgate show x --format ", {*reports.of("summary"), *reports.of("run")}),
    ("evalgate compare kl-2 ", {"runs/kl-1", "kl-2", "runs/", "texts/", "ref.trace/", "swept/"}),
    ("evalgate slices kl-2 --metric ", set(registry())),
    ("evalgate slices kl-2 --by ", {"domain", "position", "entropy", "token", "document"}),
    ("evalgate trace info ", {"ref.trace", "runs/", "texts/", "kl-2/", "swept/"}),
    ("evalgate schema ", {"summary", "gate", "sweep"}),
    ("evalgate config policy ", {"check", "init", "explain"}),
    ("evalgate pol", {"policy"}),
    ("evalgate kl --tex", {"--text-column"}),
    ("evalgate kl --color ", {"auto", "always", "never"}),
]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(("line", "wanted"), CASES, ids=[line for line, _ in CASES])
def test_what_a_word_can_become(shell, line, wanted, folder, monkeypatch, capsys):
    found = asked(shell, line, monkeypatch, capsys)
    assert set(found) == wanted


def test_a_broken_file_of_defaults_does_not_stop_completion(folder, monkeypatch, capsys):
    (folder / "evalgate.toml").write_text("nope = ]")
    assert asked("bash", "evalgate kl --windows s", monkeypatch, capsys) == ["sliding"]


def test_fish_is_told_what_a_conversion_does(folder, monkeypatch, capsys):
    monkeypatch.setenv("_EVALGATE_COMPLETE", "complete_fish")
    asked("fish", "evalgate kl --cand demo@b", monkeypatch, capsys)
    call()
    assert capsys.readouterr().out == "demo@bf16\tconverted to bf16 on load\n"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="this system has no bash")
def test_a_real_bash_completes(folder):
    """With the script that --show-completion prints."""
    bins = folder / "bin"
    bins.mkdir()
    (bins / "evalgate").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m evalgate "$@"\n')
    (bins / "evalgate").chmod(0o755)
    script = """
        eval "$(evalgate --show-completion bash)"
        COMP_WORDS=(evalgate kl --windows l) COMP_CWORD=3
        _evalgate_completion evalgate
        echo "${COMPREPLY[@]}"
    """
    environment = {
        **os.environ,
        "PATH": f"{bins}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, timeout=STUCK)
    assert done.stdout.split() == ["llama.cpp", "lm-eval"], done.stderr
