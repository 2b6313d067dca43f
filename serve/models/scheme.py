"""How a checkpoint's weights came to be in memory, in words: the load mode changes the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

DETAILS = ("bits", "group_size", "fmt", "bnb_4bit_quant_type", "activation_scheme")


def load_mode(config: Any, model: Any) -> str:
    """ "as stored", "METHOD SCHEME, as loaded" or "METHOD SCHEME, dequantized to DTYPE on load".

    `config` is the checkpoint's own, before the load; a quantizer may have changed the model's.
    """
    stored = settings(config)
    if not stored:
        return "as stored"
    words = " ".join(filter(None, [str(stored.get("quant_method", "quantized")), _scheme(stored)]))
    return f"{words}, {_outcome(model)}"


def _outcome(model: Any) -> str:
    quantizer = getattr(model, "hf_quantizer", None)
    used = getattr(quantizer, "quantization_config", None)
    kept_packed = is_quantized(model) and not getattr(used, "dequantize", False)
    if kept_packed and getattr(used, "run_compressed", True):
        return "as loaded"
    return f"dequantized to {dtype_name(model.dtype)} on load"


def settings(config: Any) -> dict[str, Any]:
    """A configuration's quantization_config, {} where it has none."""
    for holder in (config, config.get_text_config()):
        found = getattr(holder, "quantization_config", None)
        if found is not None:
            return dict(found) if isinstance(found, Mapping) else dict(found.to_dict())
    return {}


def _scheme(stored: Mapping[str, Any]) -> str:
    if stored.get("quant_method") == "compressed-tensors":
        return _compressed_tensors(stored)
    if stored.get("quant_method") == "torchao":
        return _torchao(stored.get("quant_type"))
    if stored.get("load_in_8bit"):
        return "int8"
    return " ".join(f"{key}={stored[key]}" for key in DETAILS if stored.get(key) not in (None, ""))


def _compressed_tensors(stored: Mapping[str, Any]) -> str:
    """The preset's name (FP8_DYNAMIC, W8A16, ...) rebuilt from the weights' and activations' settings."""
    names = {_preset(group) for group in (stored.get("config_groups") or {}).values() if isinstance(group, Mapping)}
    return "+".join(sorted(filter(None, names)))


def _torchao(quant_type: Any) -> str:
    """The names of torchao's configs (Int8WeightOnly, ...); older checkpoints have a name alone."""
    if not isinstance(quant_type, Mapping):
        return str(quant_type or "")
    kinds = {
        str(config["_type"]) for config in quant_type.values() if isinstance(config, Mapping) and "_type" in config
    }
    return "+".join(sorted(kind.removesuffix("Config") for kind in kinds))


def _preset(group: Mapping[str, Any]) -> str:
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    bits, kind = weights.get("num_bits"), weights.get("type")
    if kind == "float" and bits == 8:
        return ("FP8_DYNAMIC" if inputs.get("dynamic") else "FP8_STATIC") if inputs else "FP8A16"
    letter = {"float": "FP", "int": "W"}.get(str(kind), str(kind))
    if kind == "float" and bits == 4:
        letter = "NVFP" if weights.get("strategy") == "tensor_group" else "MXFP"
    return f"{letter}{bits}A{inputs.get('num_bits', 16)}" if bits else ""


def is_quantized(model: Any) -> bool:
    """Whether the loaded model still carries quantized weights or a quantizer."""
    quantizer = getattr(model, "hf_quantizer", None)
    return quantizer is not None or getattr(model.config, "quantization_config", None) is not None


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")
