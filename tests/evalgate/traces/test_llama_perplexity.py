"""Logits files against llama-perplexity itself: a recording of it always, and the program where there is one.

tests/data/llama-perplexity holds what version 0.5.0 (commit 0c1e570) wrote and printed for the models of `models`;
run these tests with EVALGATE_LLAMA_PERPLEXITY=/path/to/llama-perplexity to ask the program again.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

import evalgate
from evalgate.measure.record import RecordRequest, record
from evalgate.measure.run import RunRequest, run, silent
from evalgate.traces import read_logits_file
from tests.gguf_files import write_llama
from tests.serve import tiny_models as tiny
from tests.stuck import STUCK

pytestmark = pytest.mark.slow

RECORDED = Path(__file__).parents[2] / "data" / "llama-perplexity"
PROGRAM = shutil.which(os.environ.get("EVALGATE_LLAMA_PERPLEXITY", "llama-perplexity"))
OPTIONS = ["-c", "32", "-b", "32", "-t", "1", "-ctk", "f32", "-ctv", "f32", "-fa", "off"]


def model(*, wobble: float) -> LlamaForCausalLM:
    """Weights large enough that rows reach llama.cpp's floor; `wobble` moves each by up to that share of itself."""
    found = tiny.llama()
    with torch.no_grad():
        for name, weight in found.named_parameters():
            if weight.ndim > 1:
                rng = np.random.default_rng(len(name) + weight.numel())
                values = rng.normal(0, 0.6 if "head" in name else 0.35, tuple(weight.shape)).astype(np.float32)
                values *= 1 + np.float32(wobble) * np.sin(np.arange(values.size)).astype(np.float32).reshape(
                    values.shape
                )
                weight.copy_(torch.from_numpy(values))
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    place = tmp_path_factory.mktemp("gguf")
    base = write_llama(model(wobble=0), tiny.byte_level(), place / "base.gguf")
    return str(base), str(write_llama(model(wobble=0.02), tiny.byte_level(), place / "cand.gguf"))


@pytest.fixture(scope="module")
def ours(models: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The logits file that `record` writes of the same model and text."""
    out = tmp_path_factory.mktemp("ours") / "ours.kld"
    text = RunRequest.of(
        "ppl", None, models[:1], data=str(RECORDED / "text.txt"), windows="llama.cpp", context=32, limit=8
    )
    record(RecordRequest(text, out, format="llama.cpp"), observer=silent())
    return out


def figures(printed: str) -> dict[str, float]:
    """What llama-perplexity printed, by name."""
    lines = re.findall(r"^ *(.+?) *: +(-?[\d.]+)(?: ± +([\d.]+))?", printed, re.MULTILINE)
    found = {name: float(value) for name, value, _ in lines}
    return found | {f"{name} +-": float(error) for name, _, error in lines if error}


def check(measured: evalgate.store.runs.Run, printed: dict[str, float]) -> None:
    (comparison,) = measured.summary.comparisons
    metrics = comparison.overall.metrics
    (note,) = (n for n in measured.summary.notes if "llama.cpp's own mean KLD" in n)
    mean, error = (float(figure) for figure in note.rsplit(": ", 1)[1].split(" +- "))
    assert mean == pytest.approx(printed["Mean    KLD"], abs=5e-6)
    assert error == pytest.approx(printed["Mean    KLD +-"], abs=5e-6)
    assert metrics["perplexity"].statistics["candidate"].value == pytest.approx(printed["Mean PPL(Q)"], rel=2e-5)
    same = metrics["top1_agreement"].statistics["mean"].value
    assert 100 * same == pytest.approx(printed["Same top p"], abs=1e-3)
    kl = metrics["kl"].statistics
    for name, theirs in {
        "median": "Median  KLD",
        "p90": "90.0%   KLD",
        "p99": "99.0%   KLD",
        "max": "Maximum KLD",
    }.items():
        low, high = kl[f"{name}_low"].value, kl[f"{name}_high"].value
        assert low is not None and high is not None and low - 1e-5 <= printed[theirs] <= high + 1e-5, name


def test_a_file_of_llama_perplexity_gives_its_figures(models: tuple[str, str]) -> None:
    printed = figures((RECORDED / "printed.txt").read_text())
    check(run(RunRequest.of("kl", str(RECORDED / "base.kld"), (models[1],))), printed)


def test_our_file_is_theirs(ours: Path) -> None:
    """The same tokens but for the BOS that both put over a chunk's first, and the same codes within float32."""
    mine, theirs = read_logits_file(ours), read_logits_file(RECORDED / "base.kld")
    assert ours.stat().st_size == (RECORDED / "base.kld").stat().st_size
    assert np.array_equal(mine.tokens[:, 1:], theirs.tokens[:, 1:])
    for number in range(len(theirs.tokens)):
        a, b = mine.rows(number), theirs.rows(number)
        both = ~(a.censored | b.censored)
        assert both.mean() > 0.9 and (a.censored ^ b.censored).mean() < 1e-3
        assert (np.abs(a.logprobs - b.logprobs) <= a.rounding + b.rounding + 5e-5)[both].all()


@pytest.mark.skipif(PROGRAM is None, reason="needs llama-perplexity: EVALGATE_LLAMA_PERPLEXITY names it")
def test_the_program_itself(models: tuple[str, str], ours: Path, tmp_path: Path) -> None:
    """It writes what it wrote, and says the same of our file as of its own."""

    def program(*arguments: str) -> str:
        command: list[Any] = [PROGRAM, *arguments, *OPTIONS]
        done = subprocess.run(command, capture_output=True, text=True, timeout=STUCK, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    base = tmp_path / "base.kld"
    program("-m", models[0], "-f", str(RECORDED / "text.txt"), "--chunks", "8", "--save-all-logits", str(base))
    check_same_file(base)
    recorded = figures((RECORDED / "printed.txt").read_text())
    for file in (base, ours):
        printed = figures(program("-m", models[1], "--kl-divergence-base", str(file), "--kl-divergence"))
        for name in ("Mean    KLD", "99.0%   KLD", "Mean PPL(Q)", "Mean PPL(base)", "Same top p", "RMS Δp"):
            assert printed[name] == pytest.approx(recorded[name], rel=1e-3, abs=2e-5), name
        check(run(RunRequest.of("kl", str(file), (models[1],))), printed)


def check_same_file(base: Path) -> None:
    mine, theirs = read_logits_file(base), read_logits_file(RECORDED / "base.kld")
    assert np.array_equal(mine.tokens, theirs.tokens)
    for number in range(len(theirs.tokens)):
        np.testing.assert_allclose(mine.rows(number).logprobs, theirs.rows(number).logprobs, atol=2e-3)
