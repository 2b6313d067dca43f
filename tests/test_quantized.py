"""Quantized checkpoints as their libraries write them: loaded as they are, named, and scored as they compute."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from evalgate.measure.run import RunRequest, run
from evalgate.store.runs import Run
from tests import quantized
from tests.checkpoints import texts
from tests.gguf_files import write_llama
from tests.serve.tiny_models import byte_level

pytestmark = pytest.mark.slow

for package in ("torchao", "bitsandbytes", "compressed_tensors"):
    pytest.importorskip(package, reason="needs the 'quant' extra")

# rounding of activations sits on a knife's edge: the last bit of float32 may move a value to the next step
WEIGHTS, ACTIVATIONS = 2e-4, 2e-2
MAKERS: dict[str, tuple[Callable[[Path, Path], Path], str, str, float]] = {
    "ao-int8wo": (
        lambda s, t: quantized.torchao(s, t, "Int8WeightOnly"),
        "torchao Int8WeightOnly, as loaded",
        "packed",
        WEIGHTS,
    ),
    "ao-int8dyn": (
        lambda s, t: quantized.torchao(s, t, "Int8DynamicActivationInt8Weight"),
        "torchao Int8DynamicActivationInt8Weight, as loaded",
        "packed",
        ACTIVATIONS,
    ),
    "ao-float8wo": (
        lambda s, t: quantized.torchao(s, t, "Float8WeightOnly"),
        "torchao Float8WeightOnly, as loaded",
        "packed",
        WEIGHTS,
    ),
    "bnb-nf4": (
        lambda s, t: quantized.bitsandbytes(s, t, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        "bitsandbytes bnb_4bit_quant_type=nf4, as loaded",
        "packed",
        WEIGHTS,
    ),
    "bnb-int8": (
        lambda s, t: quantized.bitsandbytes(s, t, load_in_8bit=True),
        "bitsandbytes int8, as loaded",
        "alone",  # which columns it leaves in half precision depends on the whole batch
        ACTIVATIONS,
    ),
    "ct-fp8": (quantized.fp8_dynamic, "compressed-tensors FP8_DYNAMIC, as loaded", "packed", ACTIVATIONS),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized")


@pytest.fixture(scope="module")
def measured(place: Path) -> Run:
    reference = quantized.reference(place)
    made = tuple(str(make(reference, place / name)) for name, (make, *_) in MAKERS.items())
    return run(RunRequest.of("kl", str(reference), made, data=texts(place / "texts"), context=256))


def own_logprobs(path: Path, windows: dict[int, list[int]]) -> dict[int, np.ndarray]:
    """float64 log-softmax of transformers' own forward, a window at a time, [tokens, vocabulary]."""
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        return {
            index: torch.log_softmax(model(torch.tensor([ids]), use_cache=False).logits[0].double(), -1).numpy()
            for index, ids in windows.items()
        }


@pytest.mark.parametrize("name", MAKERS)
def test_scored_as_the_library_computes_it(measured: Run, place: Path, name: str) -> None:
    _, mode, backend, limit = MAKERS[name]
    comparison = next(c for c in measured.summary.comparisons if c.candidate.spec == str(place / name))
    assert comparison.candidate.load_mode == mode
    assert comparison.candidate.backend.split(" ")[0] == backend, comparison.candidate.backend
    frame = measured.tokens[measured.tokens["candidate"] == str(place / name)]
    windows = {}
    for index, part in frame.groupby("window"):
        assert part["position"].tolist() == list(range(1, len(part) + 1))
        windows[int(index)] = [0, *part["token"].tolist()]
    ref, cand = own_logprobs(place / "ref", windows), own_logprobs(place / name, windows)
    wrong = []
    for index, part in frame.groupby("window"):
        p, q = ref[int(index)][:-1], cand[int(index)][:-1]
        truth = (np.exp(p) * (p - q)).sum(axis=1)
        wrong.append(np.abs(part["kl"].to_numpy() - truth))
        nll = -q[np.arange(len(part)), part["token"].to_numpy()]
        np.testing.assert_allclose(part["cand_nll"], nll, atol=5 * limit)
    assert np.concatenate(wrong).max() < limit
    kl = comparison.overall.metrics["kl"].statistics["mean"].value
    assert kl is not None and kl > 1e-4


def test_a_checkpoint_and_its_gguf_file_are_one_model(place: Path) -> None:
    """Ids that the converter had to name are no other vocabulary, and float32 weights come back as they were."""
    source = quantized.reference(place / "unquantized")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    file = write_llama(model, byte_level(bos=True), place / "same.gguf")
    measured = run(RunRequest.of("kl", str(source), (str(file),), data=texts(place / "texts"), context=256))
    overall = measured.summary.comparisons[0].overall.metrics
    assert overall["kl"].statistics["max"].value == pytest.approx(0, abs=1e-9)
    assert overall["top1_agreement"].statistics["mean"].value == 1
