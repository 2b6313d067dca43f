"""Which weights of a model a conversion can round, and where each stands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from serve.errors import LoadFailed


@dataclass(frozen=True)
class Place:
    """One weight that can be rounded.

    paths: of its module, or of the tensor where the module holds several; a tied weight has several. dim: its input
    dimension. end: whether it is the output head or the embedding, which are rounded only where they are named.
    """

    paths: tuple[str, ...]
    weight: torch.Tensor
    dim: int
    end: bool = False

    @property
    def columns(self) -> int:
        """Weights of one row: inputs of one output channel."""
        return int(self.weight.shape[self.dim])

    @property
    def rows(self) -> int:
        """Rows: output channels, of all experts together."""
        return self.weight.numel() // self.columns

    def as_rows(self) -> torch.Tensor:
        """The weights as float32 rows, [rows, columns]."""
        return self.weight.detach().movedim(self.dim, -1).reshape(-1, self.columns).float()

    def from_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows put back in the weight's own shape and dtype."""
        moved = self.weight.movedim(self.dim, -1).shape
        return rows.reshape(moved).movedim(-1, self.dim).to(self.weight.dtype).contiguous()


def places(model: Any, *, conversion: str, name: str) -> list[Place]:
    """Every weight that can be rounded, in the model's order; those that are tied are one place.

    nn.Linear [out, in]; GPT-2's Conv1D [in, out]; routers [experts, in]; fused experts [E, out, in], or [E, in, out]
    where transformers marks them `is_transposed`; the head and the embedding, marked `end`.
    Raises LoadFailed where a module holds fused weights whose layout is not marked.
    """
    found: dict[int, Place] = {}
    for path, weight, dim, end in _weights(model, conversion=conversion, name=name):
        known = found.get(id(weight))
        paths = (path,) if known is None else (*known.paths, path)
        found[id(weight)] = Place(paths, weight, dim, end=end or (known is not None and known.end))
    return list(found.values())


def _weights(model: Any, *, conversion: str, name: str) -> Iterator[tuple[str, torch.Tensor, int, bool]]:
    from transformers.pytorch_utils import Conv1D

    ends = (model.get_output_embeddings(), model.get_input_embeddings())
    kept = {id(module.weight) for module in ends if module is not None}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            yield path, module.weight, 0 if isinstance(module, Conv1D) else 1, id(module.weight) in kept
        elif isinstance(module, nn.Embedding):
            if id(module.weight) in kept:
                yield path, module.weight, 1, True
        elif _is_router(module):
            yield path, module.weight, 1, False
        elif hasattr(module, "is_transposed"):
            for part, weight in _fused(module):
                yield f"{path}.{part}", weight, 1 if module.is_transposed else 2, False
        elif not type(module).__module__.startswith("torch.") and _fused(module):
            raise LoadFailed(
                f"'{name}' has fused weights in '{path}' ({type(module).__name__}) whose layout transformers does not "
                f"mark: @{conversion} cannot convert this architecture"
            )


def _is_router(module: nn.Module) -> bool:
    """Whether a module is an expert router that holds its linear weight [experts, in] itself."""
    weight = module._parameters.get("weight")
    return "Router" in type(module).__name__ and weight is not None and weight.ndim == 2


def _fused(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """A module's own weights with a leading expert dimension, by name."""
    return [
        (name, weight)
        for name, weight in module.named_parameters(recurse=False)
        if weight.ndim == 3 and weight.shape[0] > 1 and weight.is_floating_point()
    ]
