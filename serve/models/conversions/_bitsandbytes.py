"""Conversions to the 4-bit formats of bitsandbytes, by its own code."""

from __future__ import annotations

from importlib import import_module

import torch

from serve.errors import LoadFailed
from serve.models.conversions._rounding import Rounding

_USUAL = 64  # weights of a block, as transformers writes them
_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


class FourBit(Rounding):
    """`nf4` or `fp4`, in blocks of 64 weights or as many as are asked for, which run on over the ends of rows.

    Scales are float32: they are not quantized in their turn.
    """

    def __init__(self, kind: str, group: int | None = None) -> None:
        self.kind, self.group = kind, group

    @property
    def name(self) -> str:
        """See `Rounding`."""
        return self.kind + (f"-g{self.group}" if self.group else "")

    def grouped(self, size: int) -> FourBit:
        """A scale for every `size` weights. Raises LoadFailed for a size that bitsandbytes does not have."""
        if size not in _SIZES:
            raise LoadFailed(f"@{self.kind} has blocks of {', '.join(map(str, _SIZES))} weights, not of {size}")
        return FourBit(self.kind, size)

    @property
    def grid(self) -> str:
        """See `Rounding`."""
        return f"{self.kind.upper()} with a scale for every {self._block} weights (bitsandbytes)"

    @property
    def bits(self) -> str:
        """See `Rounding`."""
        return f"at 4 bits with a float32 scale for each {self._block} weights"

    @property
    def by_rows(self) -> bool:
        """See `Conversion`. Blocks run on over the ends of rows."""
        return False

    def round_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Conversion`. Raises LoadFailed where bitsandbytes is not installed."""
        try:
            library = import_module("bitsandbytes.functional")
        except ImportError as error:
            raise LoadFailed(f"@{self.name} needs bitsandbytes: pip install 'evalgate-lm[quant]'") from error
        packed, state = library.quantize_4bit(rows.contiguous(), blocksize=self._block, quant_type=self.kind)
        values: torch.Tensor = library.dequantize_4bit(packed, state)
        return values.reshape(rows.shape).float()

    def size(self, rows: int, columns: int) -> dict[str, int]:
        """See `Conversion`."""
        return {self.kind.upper(): rows * columns // 2, "F32": 4 * -(-rows * columns // self._block)}

    @property
    def _block(self) -> int:
        return self.group or _USUAL
