"""Conversions on load: a second model made from a loaded one, sharing every tensor that does not change."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from serve.errors import LoadFailed

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def convert(model: Any, conversion: str, *, name: str) -> tuple[Any, str]:
    """The converted model and the text that names the scheme.

    f32, bf16, f16: every parameter and persistent buffer in that dtype (but for those the architecture
    keeps in float32, as transformers does on load). int8: weights rounded to a symmetric per-output-channel
    grid on every linear layer but the head. Raises LoadFailed for a quantized model or one without a layer
    to convert.
    """
    if is_quantized(model):
        raise LoadFailed(f"'{name}' is already quantized: @{conversion} converts unquantized checkpoints only")
    if conversion in DTYPES:
        dtype = DTYPES[conversion]
        changed = dict(_casts(model, dtype))
        converted = _copy_sharing(model, changed)
        _set_dtype(converted.config, dtype)
        return converted, f"{conversion}: all weights converted to {dtype_name(dtype)}"
    changed = {id(weight): round_int8(weight, dim=dim) for weight, dim in int8_weights(model, name=name)}
    if not changed:
        raise LoadFailed(f"'{name}' has no linear layer that @{conversion} could convert")
    scheme = (
        "int8: weights rounded to a symmetric per-output-channel grid (absmax/127, round half to even) on every "
        f"linear layer but the head, computed in {dtype_name(model.dtype)}"
    )
    return _copy_sharing(model, changed), scheme


def round_int8(weight: torch.Tensor, *, dim: int) -> torch.Tensor:
    """Round to a symmetric 8-bit grid over `dim`, the input dimension, and back to the weight's own dtype.

    Each output channel has the scale absmax/127 (float32); a channel of zeros stays zero. Halves round to even.
    """
    values = weight.detach().float()
    scale = values.abs().amax(dim=dim, keepdim=True) / 127
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (values / scale).round_().clamp_(-127, 127).mul_(scale).to(weight.dtype)


def int8_weights(model: Any, *, name: str) -> Iterator[tuple[torch.Tensor, int]]:
    """Each weight that int8 rounds, with its input dimension.

    nn.Linear [out, in]; GPT-2's Conv1D [in, out]; routers [experts, in]; fused experts [E, out, in], or [E, in, out]
    where transformers marks them `is_transposed`. The output head and what is tied to it are left out.
    Raises LoadFailed where a module holds fused weights whose layout is not marked.
    """
    from transformers.pytorch_utils import Conv1D

    ends = (model.get_output_embeddings(), model.get_input_embeddings())
    kept = {id(module.weight) for module in ends if module is not None}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            if id(module.weight) not in kept:
                yield module.weight, 0 if isinstance(module, Conv1D) else 1
        elif _is_router(module):
            yield module.weight, 1
        elif hasattr(module, "is_transposed"):
            for weight in _fused(module):
                yield weight, 1 if module.is_transposed else 2
        elif not type(module).__module__.startswith("torch.") and _fused(module):
            raise LoadFailed(
                f"'{name}' has fused weights in '{path}' ({type(module).__name__}) whose layout transformers does not "
                "mark: @int8 cannot convert this architecture"
            )


def is_quantized(model: Any) -> bool:
    """Whether the loaded model still carries quantized weights or a quantizer."""
    quantizer = getattr(model, "hf_quantizer", None)
    return quantizer is not None or getattr(model.config, "quantization_config", None) is not None


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _is_router(module: nn.Module) -> bool:
    """Whether a module is an expert router that holds its linear weight [experts, in] itself."""
    weight = module._parameters.get("weight")
    return "Router" in type(module).__name__ and weight is not None and weight.ndim == 2


def _fused(module: nn.Module) -> list[torch.Tensor]:
    """A module's own weights with a leading expert dimension."""
    return [
        weight
        for weight in module.parameters(recurse=False)
        if weight.ndim == 3 and weight.shape[0] > 1 and weight.is_floating_point()
    ]


def _casts(model: Any, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
    """(id of the tensor, its cast) for what a load in `dtype` would hold in another dtype."""
    persistent = model.state_dict(keep_vars=True)
    protected = _kept_in_float32(model, dtype)
    for key, tensor in persistent.items():
        wanted = torch.float32 if any(re.search(part, key) for part in protected) else dtype
        if tensor.is_floating_point() and tensor.dtype != wanted:
            yield id(tensor), tensor.detach().to(wanted)


def _kept_in_float32(model: Any, dtype: torch.dtype) -> set[str]:
    """Patterns of tensor names that transformers loads in float32 whatever 16-bit dtype is asked for."""
    kept: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        kept |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return {pattern.replace("*", ".*") for pattern in kept}


def _copy_sharing(model: Any, changed: dict[int, torch.Tensor]) -> Any:
    """A copy of the module tree whose tensors are the model's own, but for those in `changed` (by id)."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        new = changed.get(id(tensor))
        if new is None:
            memo[id(tensor)] = tensor
        elif isinstance(tensor, nn.Parameter):
            memo[id(tensor)] = nn.Parameter(new, requires_grad=False)
        else:
            memo[id(tensor)] = new
    return copy.deepcopy(model, memo)


def _set_dtype(config: Any, dtype: torch.dtype) -> None:
    config.dtype = dtype
    text = config.get_text_config()
    if text is not config:
        text.dtype = dtype
