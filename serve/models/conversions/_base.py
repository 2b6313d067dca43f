"""The contract of a conversion, and how a converted model shares what it can."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from serve.models.scheme import dtype_name


class Conversion(ABC):
    """Makes a second model from a loaded one.

    dtype: what a packed, quantized model computes in under this conversion; None = it converts weights alone.
    """

    dtype: torch.dtype | None = None

    @abstractmethod
    def apply(self, model: Any, *, name: str) -> tuple[Any, str]:
        """The converted model and the text that names the scheme. Raises LoadFailed where nothing can be converted."""

    def stored(self, model: Any, *, name: str) -> tuple[dict[str, int], str]:
        """Bytes by type that the converted model would take in a file of this format, and how that was counted."""
        del name  # only some conversions look for what they converted
        return bytes_by_type(model.parameters()), "tensors as the conversion holds them"


def bytes_by_type(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """Bytes of tensors by dtype, as safetensors names dtypes (BF16, F32)."""
    found: dict[str, int] = {}
    for tensor in tensors:
        kind = dtype_name(tensor.dtype).replace("bfloat", "BF").replace("float", "F").replace("int", "I").upper()
        found[kind] = found.get(kind, 0) + tensor.numel() * tensor.element_size()
    return found


def copy_sharing(model: Any, changed: Mapping[int, torch.Tensor]) -> Any:
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
