from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from serve.config import ModelSpec
from serve.errors import LoadFailed
from serve.models.conversions import convert
from serve.models.conversions.int8 import round_int8
from tests.serve import tiny_models as tiny


def slow_int8(weight: torch.Tensor, out_dim: int) -> np.ndarray:
    """Row by row in float64, with Python's own round-half-to-even."""
    values = np.moveaxis(weight.double().numpy(), out_dim, 0)
    rows = []
    for row in values.reshape(values.shape[0], -1):
        scale = np.float32(np.abs(row).max()) / np.float32(127)
        rows.append([round(float(np.float32(x) / scale)) * float(scale) if scale else 0.0 for x in row])
    return np.moveaxis(np.array(rows).reshape(values.shape), 0, out_dim)


def pointers(model: Any) -> dict[str, int]:
    return {key: value.data_ptr() for key, value in model.state_dict().items()}


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), rows=st.integers(1, 5), columns=st.integers(1, 7), out_dim=st.sampled_from([0, 1]))
def test_round_int8_against_float64(seed: int, rows: int, columns: int, out_dim: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    got = round_int8(weight, dim=1 - out_dim)
    np.testing.assert_allclose(got.double().numpy(), slow_int8(weight, out_dim), rtol=1e-6, atol=1e-9)
    assert torch.equal(round_int8(got, dim=1 - out_dim), got) or torch.allclose(got, round_int8(got, dim=1 - out_dim))


def test_round_int8_halves_and_zero_rows() -> None:
    weight = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5], [0.0] * 6])
    assert round_int8(weight, dim=1).tolist() == [[127.0, 0.0, 2.0, 2.0, 0.0, -2.0], [0.0] * 6]


def test_int8_of_a_llama_leaves_everything_but_linear_layers_shared() -> None:
    model = tiny.llama()
    before = copy.deepcopy(model.state_dict())
    converted, scheme = convert(model, "int8", name="x")
    assert "absmax/127" in scheme and "float32" in scheme
    old, new = pointers(model), pointers(converted)
    for key in old:
        linear = "_proj" in key
        assert (old[key] != new[key]) == linear, key
        if linear:
            np.testing.assert_allclose(
                converted.state_dict()[key].double().numpy(), slow_int8(before[key], 0), rtol=1e-6, atol=1e-9
            )
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_int8_of_conv1d_uses_its_second_dimension_and_keeps_the_tied_head() -> None:
    model = tiny.gpt2()
    converted, _ = convert(model, "int8", name="x")
    assert converted.lm_head.weight is converted.transformer.wte.weight
    assert converted.lm_head.weight is model.lm_head.weight
    ours = converted.transformer.h[0].mlp.c_fc.weight
    np.testing.assert_allclose(
        ours.double().numpy(), slow_int8(model.transformer.h[0].mlp.c_fc.weight.detach(), 1), rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_int8_of_fused_experts(transposed: bool) -> None:
    model = tiny.mixtral()
    for layer in model.model.layers:
        layer.mlp.experts.is_transposed = transposed
    converted, _ = convert(model, "int8", name="x")
    for name in ("gate_up_proj", "down_proj"):
        theirs = getattr(model.model.layers[1].mlp.experts, name).detach()
        ours = getattr(converted.model.layers[1].mlp.experts, name)
        for expert in range(4):
            wanted = slow_int8(theirs[expert], 1 if transposed else 0)
            np.testing.assert_allclose(ours[expert].double().numpy(), wanted, rtol=1e-6, atol=1e-9)
    router = converted.model.layers[0].mlp.gate.weight
    wanted = slow_int8(model.model.layers[0].mlp.gate.weight.detach(), 0)
    np.testing.assert_allclose(router.double().numpy(), wanted, rtol=1e-6, atol=1e-9)


def test_gpt_oss_experts_are_marked_transposed() -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1, head_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GptOssForCausalLM(config)
    for weight in model.parameters():
        nn.init.normal_(weight)
    converted, _ = convert(model, "int8", name="x")
    theirs, ours = (m.model.layers[0].mlp.experts.gate_up_proj[1].detach() for m in (model, converted))
    np.testing.assert_allclose(ours.double().numpy(), slow_int8(theirs, 1), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2, tiny.mixtral])
def test_casts_are_what_transformers_loads(build: Any, dtype: str, tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    tiny.save(build(), tmp_path)
    wanted = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=wanted)
    ours, scheme = convert(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), dtype, name="x")
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
    assert {k: v.dtype for k, v in ours.named_buffers()} == {k: v.dtype for k, v in theirs.named_buffers()}
    assert ours.dtype == wanted and str(wanted).removeprefix("torch.") in scheme


def test_f32_of_float32_shares_everything() -> None:
    model = tiny.llama()
    assert pointers(convert(model, "f32", name="x")[0]) == pointers(model)


class Bare(nn.Module):
    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.config = tiny.llama().config
        self.head = nn.Linear(4, 8)
        if fused:
            self.experts = nn.Module()
            self.experts.__class__ = type("OddExperts", (nn.Module,), {"__module__": "odd"})
            self.experts.weight = nn.Parameter(torch.ones(2, 3, 4))

    dtype = torch.float32

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def get_input_embeddings(self) -> None:
        return None


def test_refusals() -> None:
    with pytest.raises(LoadFailed, match="no linear layer"):
        convert(Bare(fused=False), "int8", name="x")
    with pytest.raises(LoadFailed, match=r"'experts' \(OddExperts\)"):
        convert(Bare(fused=True), "int8", name="x")
    model = tiny.llama()
    model.config.quantization_config = {"quant_method": "gptq"}
    for conversion in ("int8", "bf16"):
        with pytest.raises(LoadFailed, match="already quantized"):
            convert(model, conversion, name="x")


def test_a_conversion_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up conversion in a folder of its own is parsed, completed and applied; nothing else names it."""
    from evalgate.cli.completion import complete_source
    from serve import wire
    from serve.models import conversions

    assert {"bf16", "f16", "f32", "int8", "q4_k"} < set(wire.conversions())
    (tmp_path / "halved.py").write_text(
        "from serve.models.conversions._base import Conversion, copy_sharing\n"
        "class Halved(Conversion):\n"
        "    def apply(self, model, *, name):\n"
        "        weight = model.lm_head.weight\n"
        "        return copy_sharing(model, {id(weight): weight.detach() / 2}), 'halved: half the head'\n"
        "CONVERSION = Halved()\n"
    )
    monkeypatch.setattr(wire, "_CONVERSIONS", tmp_path)
    monkeypatch.setattr(conversions, "__path__", [*conversions.__path__, str(tmp_path)])
    assert ModelSpec.parse("m@halved") == ModelSpec("m", "halved")
    assert [value for value, _ in complete_source("m@h")] == ["m@halved"]
    model = tiny.llama()
    converted, scheme = convert(model, "halved", name="m@halved")
    assert scheme == "halved: half the head"
    assert torch.equal(converted.lm_head.weight * 2, model.lm_head.weight)
    assert converted.model.embed_tokens.weight is model.model.embed_tokens.weight


def test_every_conversion_keeps_the_contract() -> None:
    from serve.models.conversions import Conversion, find
    from serve.wire import conversions

    for name in conversions():
        assert isinstance(find(name), Conversion)
        if find(name).dequantizes or find(name).merges:  # of packed models and of adapters alone
            with pytest.raises(LoadFailed, match=f"leave @{name} out"):
                convert(tiny.gpt2(), name, name="m")
            continue
        converted, scheme = convert(tiny.gpt2(), name, name="m")
        assert scheme.startswith(f"{name}: ")
        assert isinstance(converted, nn.Module)
