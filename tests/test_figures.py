"""Figures that other tools give on the same text: perplexity, and KL of Q8_0 weights and of bfloat16 compute.

The text is WikiText-2 (not part of the project), so these tests run only where it lies beside the checkout.
Expected values: llama.cpp build 11434 and PyTorch float32 on the demo model, 8 chunks of 512 tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import evalgate
from evalgate.store.runs import Run
from tests.gguf_files import requantize

TEXT = Path(__file__).parents[2] / "shared" / "data" / "wikitext2-test-60k.txt"
pytestmark = [
    pytest.mark.demo,
    pytest.mark.skipif(not TEXT.exists(), reason="the WikiText-2 excerpt does not lie beside the checkout"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    from serve.models.demo import demo_path

    eight = requantize(demo_path(), tmp_path_factory.mktemp("q8") / "q8_0.gguf", "Q8_0")
    return evalgate.compare(
        "demo@f32",
        [str(eight), "demo@bf16"],
        data=TEXT,
        windows="llama.cpp",
        context=512,
        limit=8,
        logits="model",  # the published bfloat16 figure has the model's own bfloat16 logits
    )


def test_perplexity_is_that_of_llama_cpp(run: Run) -> None:
    for comparison in run.summary.comparisons:
        assert comparison.overall.metrics["perplexity"].statistics["reference"].value == pytest.approx(15.125, abs=0.01)
    assert len(run.tokens) == 2 * 8 * 255


@pytest.mark.parametrize(("number", "kl", "agreement"), ((0, 0.00056, 0.988), (1, 0.00072, 0.974)))
def test_kl_and_agreement_are_those_of_the_published_pairs(run: Run, number: int, kl: float, agreement: float) -> None:
    metrics = run.summary.comparisons[number].overall.metrics
    assert metrics["kl"].statistics["mean"].value == pytest.approx(kl, rel=0.03)
    assert metrics["top1_agreement"].statistics["mean"].value == pytest.approx(agreement, abs=0.002)
