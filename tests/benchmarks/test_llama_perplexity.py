"""The comparison with llama-perplexity, over a program that only says what it was asked; evalgate's side is made up."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from benchmarks import llama_perplexity as bench
from benchmarks.result import SKIPPED, Result

PROGRAM = """#!{python} -S
import sys
with open({log!r}, "a") as log:
    print(*sys.argv[1:], file=log)
if "--save-all-logits" in sys.argv:
    open(sys.argv[sys.argv.index("--save-all-logits") + 1], "wb").write(bytes(1000))
else:
    print("Mean    KLD:   {kl} +/-   0.000100")
"""


class Fake:
    def __init__(self, folder: Path, kl: str) -> None:
        self.log, self.path = folder / "log", folder / "llama-perplexity"
        self.path.write_text(PROGRAM.format(python=sys.executable, log=str(self.log), kl=kl))
        self.path.chmod(0o755)

    def measured(self, folder: Path, *words: str) -> Result:
        options = bench._parser().parse_args([*words, "--runs", "1"])
        models = bench.Models(Path("ref.gguf"), Path("cand.gguf"), Path("text.txt"))
        return bench.measured(str(self.path), models, options, folder)


def test_both_are_asked_for_the_same_and_compared_by_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def evalgate(arguments: list[str]) -> bench.Took:
        asked.append(arguments)
        return bench.Took(2.0, 0.012345)

    monkeypatch.setattr(bench, "_evalgate", evalgate)
    fake = Fake(tmp_path, "0.012346")
    found = fake.measured(tmp_path, "--windows", "16", "64", "--context", "128", "--threads", "2")
    first, second, *_ = fake.log.read_text().splitlines()
    logits = tmp_path / "base.kld"
    sizes = "-c 128 -b 128 -t 2"
    assert first == f"-m ref.gguf {sizes} --chunks=16 -f text.txt --save-all-logits {logits}"
    assert second == f"-m cand.gguf {sizes} --kl-divergence --kl-divergence-base {logits}"
    pair, one = (" ".join(arguments) for arguments in asked[:2])
    assert "--windows llama.cpp --context 128 --limit 16" in pair
    assert one == f"--ref-trace {logits} --cand cand.gguf"
    assert not logits.exists()
    goals = {name: ratio.goal for name, ratio in found.ratios.items()}
    assert goals["both models, 16 windows: times as fast"] == 1.3
    assert goals["both models, 64 windows: times as fast"] == 1.7
    assert goals["one candidate against its logits file, 64 windows: times as fast"] == 0.7
    assert found.figures["its logits file of 16 windows"].value == 0.001


def test_times_of_programs_that_disagree_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_evalgate", lambda _: bench.Took(2.0, 0.02))
    with pytest.raises(RuntimeError, match=r"finds a mean KL of 0\.020000 and llama-perplexity one of 0\.012345"):
        Fake(tmp_path, "0.012345").measured(tmp_path, "--windows", "1")


def test_without_the_program_the_benchmark_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("LLAMA_PERPLEXITY", raising=False)
    with pytest.raises(SystemExit) as end:
        bench.found_program(None)
    assert end.value.code == SKIPPED
    with pytest.raises(SystemExit, match="/no/such is not a program"):
        bench.found_program("/no/such")


def test_models_are_named_with_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["a.gguf"], ["a.gguf", "b.gguf"]):
        monkeypatch.setattr(sys, "argv", ["llama_perplexity", *words])
        with pytest.raises(SystemExit, match=r"name (both|a text)"):
            bench.main()
    assert isinstance(bench._parser(), argparse.ArgumentParser)
