"""Conversions to formats of compressed-tensors, by its own arithmetic: what llm-compressor writes without calibration
(round to nearest)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from serve.errors import LoadFailed
from serve.models.conversions._rounding import Rounding, check_groups


class Compressed(Rounding):
    """A format by the settings of compressed-tensors' QuantizationArgs.

    name: without a group size. bits_each: of a weight. kind: "int" or "float". block: weights that share a scale by the
    format's definition; group: those that were asked for; neither = a scale a row. tensor_scale: whether all scales
    share another one (NVFP4). scale: their dtype, None = 16 bits.
    """

    def __init__(
        self,
        name: str,
        bits_each: int,
        kind: str,
        *,
        block: int | None = None,
        group: int | None = None,
        tensor_scale: bool = False,
        scale: str | None = None,
    ) -> None:
        self._name, self.bits_each, self.kind = name, bits_each, kind
        self.group, self._block, self._by_definition = group, group or block, block is not None
        self._tensor_scale, self._scale = tensor_scale, scale
        self._scale_bits = 16 if scale is None else 8

    @property
    def name(self) -> str:
        """See `Rounding`."""
        return self._name + (f"-g{self.group}" if self.group else "")

    def grouped(self, size: int) -> Compressed:
        """A scale for every `size` weights of a row; refused by formats that fix their blocks."""
        if self._by_definition:
            raise LoadFailed(f"@{self.name} has blocks of {self._block} weights by definition: write @{self.name}")
        return Compressed(self._name, self.bits_each, self.kind, group=size)

    @property
    def grid(self) -> str:
        """See `Rounding`."""
        scale = f"a scale for every {self._block} weights" if self._block else "a scale for each output channel"
        return (
            f"{self.bits_each}-bit {'integers' if self.kind == 'int' else 'floats'} with {scale} (compressed-tensors)"
        )

    @property
    def bits(self) -> str:
        """See `Rounding`."""
        each = f"{self._block} weights" if self._block else "output channel"
        return f"at {self.bits_each} bits with a {self._scale_bits}-bit scale for each {each}"

    @property
    def by_rows(self) -> bool:
        """See `Conversion`."""
        return not self._tensor_scale

    def round_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Conversion`. Raises LoadFailed where compressed-tensors is not installed."""
        if self._block:
            check_groups(rows.shape[1], self._block, name=self.name)
        args = self._args()
        helpers = import_module("compressed_tensors.quantization.utils.helpers")
        groups = rows.reshape(rows.shape[0], -1, self._block or rows.shape[1])
        low, high = groups.amin(dim=-1), groups.amax(dim=-1)
        shared = helpers.generate_gparam(low.min(), high.max()) if self._tensor_scale else None
        scale, zero = helpers.calculate_qparams(low, high, args, global_scale=shared)
        rounding = import_module("compressed_tensors.quantization.lifecycle.forward")
        values: torch.Tensor = rounding.fake_quantize(rows, scale, zero, args, global_scale=shared)
        return values.float()

    def size(self, rows: int, columns: int) -> dict[str, int]:
        """See `Conversion`."""
        scales = rows * (columns // self._block if self._block else 1)
        found = {f"{'I' if self.kind == 'int' else 'F'}{self.bits_each}": rows * columns * self.bits_each // 8}
        return found | {f"scales of {self._scale_bits} bits": scales * self._scale_bits // 8 + 4 * self._tensor_scale}

    def _args(self) -> Any:
        try:
            library = import_module("compressed_tensors.quantization")
        except ImportError as error:
            raise LoadFailed(f"@{self.name} needs compressed-tensors: pip install 'evalgate-lm[quant]'") from error
        options: dict[str, Any] = {} if self._scale is None else {"scale_dtype": getattr(torch, self._scale)}
        strategy = "tensor_group" if self._tensor_scale else "group" if self._block else "channel"
        return library.QuantizationArgs(
            num_bits=self.bits_each,
            type=self.kind,
            strategy=strategy,
            group_size=self._block,
            symmetric=True,
            dynamic=False,
            **options,
        )
