"""Checkpoint folders: read by transformers, or by the library that wrote them, as stored or unpacked."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn

from serve.config import Reading
from serve.errors import LoadFailed
from serve.models import readers, room
from serve.models.checks import check_code, check_method, check_task
from serve.models.scheme import dtype_name, is_quantized, load_mode, settings
from serve.models.source import Source
from serve.models.tokenizerfiles import load_tokenizer

_HALF_ONLY = {  # formats that do not run in float32 on a CPU, and why
    "nvfp4-pack-quantized": "its layers unpack to bfloat16 whatever they are given",
    "mxfp4-pack-quantized": "its layers unpack to bfloat16 whatever they are given",
    "auto-round": "auto-round's layers give NaN in float32",
}


@dataclass(frozen=True)
class Compute:
    """What a model is asked to compute in, "auto" = the checkpoint's own dtype, and why."""

    dtype: torch.dtype | str
    reason: str


def read_checkpoint(
    source: Source, reading: Reading, *, device: str, dtype: torch.dtype | None, dequantize: bool
) -> tuple[Any, Any, Mapping[str, Any], str, Compute]:
    """Model, tokenizer, loading info, load mode, and what it computes in.

    dtype: what is asked for, None = float32 on a CPU and the checkpoint's own elsewhere. dequantize: unpack packed
    weights. Raises LoadFailed for what cannot be read so; lets the libraries' own errors through.
    """
    from transformers import AutoModelForCausalLM

    trusted = reading.trust_remote_code
    raw = config_json(source)
    check_code(raw, name=source.name, trusted=trusted)
    reader = readers.find(source.path)
    if reader is not None:
        compute = compute_in({}, device=device, dtype=dtype)
        model, words = reader.read(source.path, dtype=_concrete(compute.dtype), device=device)
        mode = f"{words}, {_unpack(model, source.name) if dequantize else 'as loaded'}"
        return model, load_tokenizer(source.path, trust_remote_code=trusted), _NOTHING, mode, compute
    config = open_config(source, raw, trusted=trusted)
    stored = settings(config)
    compute = compute_in(stored, device=device, dtype=dtype)
    options: dict[str, Any] = {} if device == "cpu" else {"device_map": {"": device}}
    if device == room.SEVERAL:
        options = room.device_map(room.each_device())
    on_load = dequantize and _unpacks_on_load(stored)
    if on_load:
        _holder(config).quantization_config = {**stored, "dequantize": True}
    model, info = AutoModelForCausalLM.from_pretrained(
        source.path,
        config=config,
        dtype=compute.dtype,
        trust_remote_code=trusted,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # so that check_loading can name them; they are refused there
        **options,
    )
    room.check_placed(getattr(model, "hf_device_map", None) or {}, name=source.name)
    mode = load_mode(config, model)
    if dequantize:
        outcome = _unpack(model, source.name) if not on_load else f"dequantized to {dtype_name(model.dtype)} on load"
        mode = f"{mode.rpartition(', ')[0]}, {outcome}"
    if isinstance(compute.dtype, torch.dtype) and model.dtype != compute.dtype:
        compute = Compute(model.dtype, "its quantization computes in nothing else")
    return model, load_tokenizer(source.path, trust_remote_code=trusted), info, mode, compute


def open_config(source: Source, raw: Mapping[str, Any], *, trusted: bool) -> Any:
    """The configuration of a checkpoint folder. raw: its config.json; trusted: code that it brings may run.

    Raises LoadFailed for one that is not a causal language model's, or is of a quantization that transformers lacks.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    config = AutoConfig.from_pretrained(source.path, trust_remote_code=trusted)
    check_task(config, name=source.name)
    check_method(config, name=source.name)
    own = trusted and "AutoModelForCausalLM" in (raw.get("auto_map") or {})
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not own:
        raise LoadFailed(f"'{source.name}' is not a causal language model ({config.model_type}): give one that is")
    return config


_NOTHING: dict[str, Any] = {"error_msgs": [], "missing_keys": [], "mismatched_keys": [], "unexpected_keys": []}


def config_json(source: Source) -> dict[str, Any]:
    """The config.json of a folder, {} for one that is not an object. Raises LoadFailed for what is not JSON."""
    try:
        found = json.loads((source.path / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise LoadFailed(f"'{source.name}' cannot be loaded: its config.json is not JSON ({error})") from error
    return found if isinstance(found, dict) else {}


def compute_in(stored: Mapping[str, Any], *, device: str, dtype: torch.dtype | None) -> Compute:
    """What a checkpoint is to compute in. stored: its quantization_config; dtype: what a conversion asks for."""
    if dtype is not None:
        return Compute(dtype, f"asked for: {dtype_name(dtype)}")
    if device != "cpu":
        return Compute("auto", "as the checkpoint says, on an accelerator")
    for key in (str(stored.get("format", "")), str(stored.get("quant_method", ""))):
        if key in _HALF_ONLY:
            return Compute(torch.bfloat16, _HALF_ONLY[key])
    return Compute(torch.float32, "on a CPU, so that the measurement is finer than what it measures")


def _concrete(dtype: torch.dtype | str) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def _unpacks_on_load(stored: Mapping[str, Any]) -> bool:
    """Whether transformers unpacks this quantization's weights while it loads them, where it is asked to."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    kind = AUTO_QUANTIZATION_CONFIG_MAPPING.get(str(stored.get("quant_method", "")))
    return kind is not None and "dequantize" in inspect.signature(kind.__init__).parameters


def _holder(config: Any) -> Any:
    """The configuration that has the quantization: the model's, or that of its text part."""
    return config if getattr(config, "quantization_config", None) is not None else config.get_text_config()


def _unpack(model: Any, name: str) -> str:
    """Unpack a loaded model's layers in place, by their own library; the outcome in words. Raises LoadFailed."""
    quantizer = getattr(model, "hf_quantizer", None)
    dtype = model.dtype
    unpacked = 0
    if quantizer is not None and type(quantizer)._dequantize is not _base_quantizer()._dequantize:
        model.dequantize()
        unpacked = 1
    else:
        for path, module in list(model.named_modules()):
            weight = _own_values(module)
            if weight is not None:
                _replace(model, path, weight.to(dtype), getattr(module, "bias", None))
                unpacked += 1
    if not unpacked:
        raise LoadFailed(f"'{name}' cannot be dequantized here: its library does not unpack its layers")
    if is_quantized(model):
        for holder, mark in ((model, "hf_quantizer"), (model.config, "quantization_config")):
            if hasattr(holder, mark):
                delattr(holder, mark)
    return f"dequantized to {dtype_name(dtype)} on load"


def _base_quantizer() -> Any:
    return import_module("transformers.quantizers.base").HfQuantizer


def _own_values(module: nn.Module) -> torch.Tensor | None:
    """A packed linear layer's weights [out, in] as its library unpacks them; None for any other module."""
    if type(module).__name__ == "HQQLinear":
        found: torch.Tensor = module.dequantize()  # type: ignore[operator]
        return found
    weight = module._parameters.get("weight")
    if weight is None or not hasattr(weight, "dequantize") or not hasattr(weight, "__tensor_flatten__"):
        return None  # a plain tensor has the method too
    values: torch.Tensor = weight.dequantize()
    return values


def _replace(model: nn.Module, path: str, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    parent, _, last = path.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)
