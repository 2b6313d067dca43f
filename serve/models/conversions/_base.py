"""The contract of a conversion, and how a converted model shares what it can."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from serve.errors import LoadFailed
from serve.models.scheme import dtype_name

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Part:
    """What one tensor of a converted model would take in a file.

    path: of its module, or of the tensor itself where the module holds several. scheme: the conversion's name, or the
    dtype where it is left as it is. types: bytes by type. vector: whether it has one dimension.
    """

    path: str
    parameters: int
    scheme: str
    types: Mapping[str, int]
    vector: bool = False


class Conversion(ABC):
    """Makes a second model from a loaded one.

    dtype: what a packed, quantized model computes in under this conversion; None = it converts weights alone.
    dequantizes: whether it is the model read again with its packed weights unpacked. merges: whether it is the model
    read again with its adapter merged.
    """

    dtype: torch.dtype | None = None
    dequantizes: bool = False
    merges: bool = False

    @property
    def by_rows(self) -> bool:
        """Whether a row of weights is converted to the same values whatever rows there are beside it."""
        return False

    @property
    def name(self) -> str:
        """What follows `@`: the name of the file that defines it."""
        return type(self).__module__.rpartition(".")[2]

    @abstractmethod
    def apply(self, model: Any, *, name: str) -> tuple[Any, str]:
        """The converted model and the text that names the scheme. Raises LoadFailed where nothing can be converted."""

    def changes(self, model: Any, *, name: str) -> dict[str, Change]:
        """What is done to each tensor by its name in the state dict, for weights that are read layer by layer.

        Needs the model's structure alone: its tensors may be without data. Raises LoadFailed as `apply` does.
        """
        raise LoadFailed(f"'{name}': @{self.name} converts a model as a whole, which cannot be streamed: leave it out")

    def scheme(self, model: Any, *, name: str) -> str:
        """The text that names the scheme, as `apply` gives it; needs the structure alone."""
        raise LoadFailed(f"'{name}': @{self.name} converts a model as a whole, which cannot be streamed: leave it out")

    def parts(self, model: Any, *, name: str) -> Iterator[Part]:
        """What each tensor of the converted model would take in a file of this format."""
        del name  # only some conversions look for what they converted
        for path, parameter in model.named_parameters():
            stored, vector = bytes_by_type([parameter]), parameter.ndim < 2
            yield Part(module_of(path), parameter.numel(), kind(parameter), stored, vector)

    def stored(self, model: Any, *, name: str) -> tuple[dict[str, int], str]:
        """Bytes by type that the converted model would take in a file of this format, and how that was counted."""
        return summed(part.types for part in self.parts(model, name=name)), self.counted

    counted = "tensors as the conversion holds them"

    def grouped(self, size: int) -> Conversion:
        """The conversion with a scale for every `size` weights. Raises LoadFailed where it has no such form."""
        raise LoadFailed(f"@{self.name} takes no group size: write @{self.name} in place of @{self.name}-g{size}")

    def round_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The values that rows of weights have after the conversion, float32 [rows, inputs], for a single layer.

        Raises LoadFailed where the conversion cannot be one layer's.
        """
        del rows
        raise LoadFailed(f"@{self.name} is of whole models: it cannot be one layer's conversion")

    def size(self, rows: int, columns: int) -> dict[str, int]:
        """Bytes by type of rows of weights in a file. Raises LoadFailed as `round_rows`."""
        raise LoadFailed(f"@{self.name} is of whole models: it cannot be one layer's conversion")


def module_of(path: str) -> str:
    """The path of the module that a parameter `PATH.weight` or `PATH.bias` belongs to; of others, the parameter's."""
    return path.removesuffix(".weight").removesuffix(".bias")


def kind(tensor: torch.Tensor) -> str:
    """A tensor's dtype as safetensors names it: BF16, F32."""
    return dtype_name(tensor.dtype).replace("bfloat", "BF").replace("float", "F").replace("int", "I").upper()


def bytes_by_type(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """Bytes of tensors by dtype, as safetensors names dtypes (BF16, F32)."""
    return summed({kind(tensor): tensor.numel() * tensor.element_size()} for tensor in tensors)


def summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Bytes by type of all counts together."""
    found: dict[str, int] = {}
    for count in counts:
        for name, size in count.items():
            found[name] = found.get(name, 0) + size
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
