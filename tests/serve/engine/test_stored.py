"""Hidden rows and a head file in the place of a reference: every column to the last bit."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t

from serve.config import EngineConfig
from serve.engine.pair import Columns, ScoreJob, ScoreWindow
from serve.engine.runtime import HeadRuntime, ModelRuntime
from serve.engine.stored import GivenRows, HeadModel, given_rows, head_written
from serve.errors import BadRequest, LoadFailed, Mismatch
from serve.models.headfile import KEY, apply_norm, read_head
from tests.serve.architectures import _SIZES, _small, built, perturbed, runtime, tokens

WINDOWS = [ScoreWindow(tokens(n, seed=n), tuple(range(first, n))) for n, first in ((40, 1), (2, 1), (23, 11), (31, 1))]


def with_bias() -> Any:
    model = copy.deepcopy(built("llama"))
    bias = torch.nn.Parameter(torch.randn(320, generator=torch.Generator().manual_seed(5)))
    model.lm_head = torch.nn.Linear(32, 320, bias=True)
    model.lm_head.weight, model.lm_head.bias = torch.nn.Parameter(torch.randn(320, 32) * 0.2), bias
    return model.eval()


MODELS = {
    "untied": lambda: built("llama"),
    "tied": lambda: _small(t.LlamaConfig(**_SIZES, tie_word_embeddings=True)),
    "soft cap": lambda: built("gemma2"),
    "logit scale": lambda: built("cohere"),
    "logits scaling": lambda: built("granite"),
    "head bias": with_bias,
    "narrow head": lambda: built("opt"),
    "layer norm": lambda: built("gpt2"),
    "padded vocabulary": lambda: _small(t.LlamaConfig(**_SIZES | {"vocab_size": 384})),
    "padded runner": lambda: built("mamba"),
}


def scored(
    reference: HeadRuntime | None, candidates: list[Any], *, known: Any = None, **more: Any
) -> tuple[Columns, torch.Tensor]:
    job = ScoreJob(reference, candidates, WINDOWS, 10, on_end=lambda _: None, top_k=5, known=known, **more)
    job.validate()
    while not job.finished:
        job.advance()
    return job.columns(), job.hidden()


def recorded(ref: ModelRuntime, folder: Path) -> tuple[HeadModel, torch.Tensor, Columns]:
    path, digest = head_written(ref, folder)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest == path.stem
    columns, rows = scored(None, [ref], sends_hidden=True)
    return HeadModel("kept", path, ref.config), rows, columns


# Mamba multiplies its head in float32 whatever its dtype, so that only its own code gives its logits in bfloat16.
PAIRS = [(name, torch.float32) for name in MODELS]
PAIRS += [(name, torch.bfloat16) for name in MODELS if name != "padded runner"]


@pytest.mark.parametrize(("name", "dtype"), PAIRS, ids=[f"{name}, {dtype}" for name, dtype in PAIRS])
def test_same_bits(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Pair scoring from hidden rows and the head's file equals pair scoring of both models, in several batches."""
    model = copy.deepcopy(MODELS[name]()).to(dtype)
    sizes = {"max_batch_tokens": 64, "tile_bytes": 7 * 4 * 320}
    ref, cand = runtime(model, "ref", **sizes), runtime(perturbed(model), "cand", **sizes)
    live, _ = scored(ref, [cand, ref])
    head, rows, alone = recorded(ref, tmp_path)
    assert rows.dtype == dtype
    again, _ = scored(head, [cand, ref], known=GivenRows(WINDOWS, rows), bits=True)
    own = again.pop("candidate") == 1
    assert not again["unequal"][own].any() and again["unequal"][~own].any()
    first = live.pop("candidate") == 0
    del again["unequal"]
    assert again.keys() == live.keys()
    for column, values in live.items():
        assert again[column].tobytes() == values.tobytes(), column
    assert alone["cand_nll"].tobytes() == live["ref_nll"][first].tobytes()


def test_head_file_is_the_same_each_time_and_narrow_where_that_rounds_nothing(tmp_path: Path) -> None:
    model = copy.deepcopy(built("llama")).bfloat16().float()
    ref = runtime(model, "ref")
    first, second = head_written(ref, tmp_path / "a"), head_written(ref, tmp_path / "b")
    assert first[1] == second[1]
    from safetensors import safe_open

    with safe_open(first[0], framework="pt") as file:
        assert file.get_tensor("weight").dtype == torch.bfloat16 and list(file.metadata()) == [KEY]
    assert torch.equal(read_head(first[0]).linear.weight, ref.loaded.model.lm_head.weight)
    assert [path.name for path in (tmp_path / "a").iterdir()] == [first[0].name]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "opt", "cohere"])
def test_norm_is_recognised_by_what_it_does(name: str, tmp_path: Path) -> None:
    """Gemma's gain is 1 + weight, GPT-2's norm has a bias; OPT projects after its norm, so that none is recognised."""
    from serve.engine.stored import _last_norm

    ref = runtime(built(name), name)
    found = _last_norm(ref)
    if name == "opt":
        assert found is None
        return
    assert found is not None and found.kind == ("layer" if name in ("gpt2", "cohere") else "rms")
    module = ref.loaded.model.base_model
    module = module.ln_f if name == "gpt2" else module.norm
    rows = torch.randn(5, 32) * 3 + 1
    assert torch.allclose(apply_norm(found, rows), module(rows), atol=1e-4)


def test_rows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    ref = runtime(built("llama"), "ref")
    head, rows, _ = recorded(ref, tmp_path)
    raw = rows.view(torch.uint8).numpy()
    assert torch.equal(given_rows(head, WINDOWS, "float32", raw).find(WINDOWS, 0), rows)
    with pytest.raises(BadRequest, match="use one of float32, bfloat16, float16"):
        given_rows(head, WINDOWS, "int8", raw)
    with pytest.raises(BadRequest, match="hidden rows came for"):
        given_rows(head, WINDOWS, "float32", raw[1:])
    with pytest.raises(Mismatch, match="for a head of 32 x bfloat16"):
        given_rows(head, WINDOWS, "bfloat16", raw)
    with pytest.raises(BadRequest, match="without a body"):
        scored(ref, [head])
    with pytest.raises(BadRequest, match="one candidate"):
        scored(None, [ref, ref], sends_hidden=True)
    with pytest.raises(BadRequest, match="name it"):
        scored(None, [ref], bits=True)


def test_heads_that_no_file_holds(tmp_path: Path) -> None:
    own = runtime(built("llama"), "own", logits="model")
    with pytest.raises(LoadFailed, match="not a plain linear layer"):
        head_written(own, tmp_path)
    broken = tmp_path / "broken.safetensors"
    for content in (b"", b"\x08\0\0\0\0\0\0\0{}      ", np.zeros(100).tobytes()):
        broken.write_bytes(content)
        with pytest.raises(LoadFailed, match="there is no output head in"):
            HeadModel("x", broken, EngineConfig())
    with pytest.raises(LoadFailed, match="cannot write the output head"):
        head_written(runtime(built("llama")), broken / "folder")


@pytest.mark.demo
def test_the_demo_in_both_dtypes(tmp_path: Path) -> None:
    """One load: the demo's tied head of 262,144 ids and 640 numbers, in float32 and with a bfloat16 body."""
    from serve.config import ModelSpec
    from serve.models.load import load_models

    config = EngineConfig(device="cpu", remember_checks=True)
    specs = [ModelSpec("demo"), ModelSpec("demo", "bf16"), ModelSpec("demo", "int8")]
    wide, narrow, cand = (ModelRuntime(m, config, kv_memory=1 << 24) for m in load_models(specs, device="cpu"))
    for ref, dtype in ((wide, torch.float32), (narrow, torch.bfloat16)):
        live, _ = scored(ref, [cand])
        head, rows, _ = recorded(ref, tmp_path)
        assert rows.dtype == dtype and rows.shape == (len(live["kl"]), 640)
        again, _ = scored(head, [cand], known=GivenRows(WINDOWS, rows))
        for column, values in live.items():
            assert again[column].tobytes() == values.tobytes(), (dtype, column)
