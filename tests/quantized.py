"""Real quantized checkpoints of a tiny Llama, each made by its own library (compressed-tensors' by its format)."""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TorchAoConfig

from serve.selftest.checks import write_fp8_dynamic
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
    write_fp8_dynamic(source, target)
    byte_level(bos=True).save_pretrained(target)
    return target


def _saved(source: Path, target: Path, config: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype=torch.float32)
        model.save_pretrained(target)
    byte_level(bos=True).save_pretrained(target)
    return target
