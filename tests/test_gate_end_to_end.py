"""`evalgate gate` with a real server: noise floor, early stop, verdicts, on tiny checkpoints and on the demo model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evalgate.store.runs import read_run
from tests.checkpoints import pair
from tests.stuck import STUCK

pytestmark = pytest.mark.slow

LOOSE = '[[rules]]\nmetric = "kl"\nmax = 50\n[[rules]]\nmetric = "kl"\nagainst = "floor"\nmax = 50\n'
STRICT = '[[rules]]\nmetric = "kl"\nmax = 1e-9\n'


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "evalgate", *arguments], capture_output=True, text=True, timeout=STUCK, **options
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gate")


@pytest.fixture(scope="module")
def models(place: Path) -> tuple[str, str]:
    return pair(place / "models")


@pytest.fixture(scope="module")
def data(place: Path) -> str:
    (place / "texts").mkdir()
    for i in range(40):
        (place / "texts" / f"{i:02}.txt").write_text(f"Document {i} says {i * i} and then {'so on ' * (i % 5 + 3)}.")
    return str(place / "texts")


def test_a_gate_measures_its_noise_floor_and_judges(place: Path, models: tuple[str, str], data: str) -> None:
    ref, cand = models
    (place / "loose.toml").write_text(LOOSE)
    out = place / "run"
    options = ("--data", data, "--context", "32", "--out", str(out), "--json")
    done = command("gate", "--policy", str(place / "loose.toml"), "--ref", ref, "--cand", cand, *options)
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert [r["verdict"] for r in body["candidates"][0]["rules"]] == ["pass", "pass"]
    run = read_run(out)
    noise = run.summary.comparisons[0].noise
    assert noise is not None and len(noise.conditions) == 6 and noise.windows == 8
    kl = run.summary.comparisons[0].overall.metrics["kl"].statistics["mean"]
    assert 0 <= noise.figures["kl"]["mean"].value < 1e-6 < kl.value
    assert noise.excess["kl"]["mean"].value == pytest.approx(kl.value, rel=1e-3)
    assert run.token_texts is not None and set(run.token_texts) >= set(run.table.column("token").to_pylist())
    assert command("slices", str(out), "--by", "token").returncode == 0
    (place / "strict.toml").write_text(STRICT)
    assert command("gate", "--policy", str(place / "strict.toml"), "--run", str(out)).returncode == 1


def test_a_sequential_gate_stops_before_the_corpus_ends(place: Path, models: tuple[str, str], data: str) -> None:
    ref, cand = models
    (place / "strict.toml").write_text(STRICT)
    options = ("--data", data, "--context", "32", "--sequential", "--no-noise-floor", "--json", "--seed", "3")
    out = place / "sequential"
    command_line = ("gate", "--policy", str(place / "strict.toml"), "--ref", ref, "--cand", cand, *options)
    done = command(*command_line, "--out", str(out))
    assert done.returncode == 1, done.stderr
    body = json.loads(done.stdout)
    assert body["sequential"]["of"] == 40 and 1 <= body["sequential"]["documents"] < 40
    again = json.loads(command(*command_line, "--out", str(place / "again")).stdout)
    assert again["candidates"] == body["candidates"] and again["sequential"] == body["sequential"]


@pytest.fixture(scope="module")
def broken(place: Path) -> str:
    """The demo model with the rows of one layer's weights permuted, as a checkpoint."""
    import torch

    from serve.models.demo import demo_path
    from serve.models.gguf import load_gguf

    model, tokenizer, _ = load_gguf(demo_path(), device="cpu")
    with torch.no_grad():
        weight = model.model.layers[8].mlp.down_proj.weight
        weight.copy_(weight[torch.randperm(weight.shape[0], generator=torch.Generator().manual_seed(0))])
    model.save_pretrained(place / "broken")
    tokenizer.save_pretrained(place / "broken")
    return str(place / "broken")


@pytest.mark.demo
def test_demo_against_bf16_int8_and_a_broken_copy(place: Path, broken: str) -> None:
    """bf16 never fails, int8 gets a verdict that its interval bears out, permuted weights fail."""
    out = place / "demo"
    candidates = ("--cand", "demo@bf16", "--cand", "demo@int8", "--cand", broken)
    options = ("--context", "24", "--limit", "24", "--no-noise-floor", "--out", str(out))
    done = command("gate", "--policy", "8bit", "--ref", "demo", *candidates, *options)
    assert done.returncode == 1, done.stderr
    codes = {}
    for name in ("demo@bf16", "demo@int8", broken):
        judged = command("gate", "--policy", "8bit", "--run", str(out), "--candidate", name, "--json")
        body = json.loads(judged.stdout)
        assert judged.returncode == body["exit_code"]
        codes[name] = judged.returncode
        for rule in body["candidates"][0]["rules"]:
            below = rule["max"] is None or rule["high"] <= rule["max"]
            above = rule["min"] is None or rule["low"] >= rule["min"]
            # A pass needs more than the interval; where it lacks that, the reason says so.
            inside = rule["verdict"] == "pass" or "is inside the limit, but" in rule["reason"]
            assert inside == (below and above), rule
    assert codes["demo@bf16"] in (0, 3) and codes[broken] == 1
    assert codes["demo@int8"] in (0, 1, 3)
