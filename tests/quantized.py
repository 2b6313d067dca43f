"""Real quantized checkpoints of a tiny Llama, each made by its own library (compressed-tensors' by its format)."""

from __future__ import annotations

import json
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TorchAoConfig

from tests.serve.tiny_models import byte_level, save


def reference(place: Path) -> Path:
    """The checkpoint that the others are made of."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=304,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    return save(LlamaForCausalLM(config).eval(), place / "ref", byte_level(bos=True))


def torchao(source: Path, target: Path, scheme: str) -> Path:
    """`scheme`: the name of one of torchao's configs, without "Config"."""
    config = getattr(import_module("torchao.quantization"), f"{scheme}Config")
    return _saved(source, target, TorchAoConfig(config()))


def bitsandbytes(source: Path, target: Path, **options: Any) -> Path:
    """`options` of BitsAndBytesConfig."""
    return _saved(source, target, BitsAndBytesConfig(**options))


def fp8_dynamic(source: Path, target: Path) -> Path:
    """compressed-tensors' FP8_DYNAMIC: a scale an output channel, and activations rounded a token at a time."""
    target.mkdir()
    tensors = {}
    for name, weight in load_file(source / "model.safetensors").items():
        tensors[name] = weight
        if name.endswith("proj.weight"):
            scale = weight.abs().amax(dim=1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
            tensors |= {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    shared = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**shared, "strategy": "channel", "dynamic": False},
        "input_activations": {**shared, "strategy": "token", "dynamic": True},
    }
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (target / "config.json").write_text(json.dumps(config))
    byte_level(bos=True).save_pretrained(target)
    return target


def _saved(source: Path, target: Path, config: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype=torch.float32)
        model.save_pretrained(target)
    byte_level(bos=True).save_pretrained(target)
    return target
