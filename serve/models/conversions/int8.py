"""`@int8`: weights rounded to a symmetric 8-bit grid, computed in the model's own dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from serve.errors import LoadFailed
from serve.models.conversions._base import Conversion, copy_sharing
from serve.models.scheme import dtype_name


class Int8(Conversion):
    """Weights rounded per output channel on every linear layer but the head."""

    def apply(self, model: Any, *, name: str) -> tuple[Any, str]:
        """The rounded model. Raises LoadFailed for one without a layer to convert."""
        changed = {id(weight): round_int8(weight, dim=dim) for weight, dim in int8_weights(model, name=name)}
        if not changed:
            raise LoadFailed(f"'{name}' has no linear layer that @int8 could convert")
        scheme = (
            "int8: weights rounded to a symmetric per-output-channel grid (absmax/127, round half to even) on every "
            f"linear layer but the head, computed in {dtype_name(model.dtype)}"
        )
        return copy_sharing(model, changed), scheme

    def stored(self, model: Any, *, name: str) -> tuple[dict[str, int], str]:
        """The rounded weights at 8 bits with a float32 scale for each output channel, all else at 16 bits."""
        rounded = {id(weight): (weight, dim) for weight, dim in int8_weights(model, name=name)}
        weights = sum(weight.numel() for weight, _ in rounded.values())
        scales = sum(weight.numel() // weight.shape[dim] for weight, dim in rounded.values())
        rest = sum(tensor.numel() for tensor in model.parameters() if id(tensor) not in rounded)
        counted = "linear layers at 8 bits with a float32 scale for each output channel, all else at 16 bits"
        return {"I8": weights, "F32": 4 * scales, "BF16": 2 * rest}, counted


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


CONVERSION = Int8()
