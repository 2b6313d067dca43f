"""`@int8`, `@int8-gN`: weights rounded to a symmetric 8-bit grid, a scale a row or for every N weights."""

from __future__ import annotations

import torch

from serve.models.conversions._rounding import Rounding, check_groups


class Int8(Rounding):
    """Weights rounded per output channel, or in groups, on every linear layer but the head."""

    def __init__(self, group: int | None = None) -> None:
        self.group = group

    def grouped(self, size: int) -> Int8:
        """A scale for every `size` weights of a row."""
        return Int8(size)

    @property
    def grid(self) -> str:
        """See `Rounding`."""
        each = f"a grid with a scale for every {self.group} weights" if self.group else "per-output-channel grid"
        return f"{'a symmetric ' if not self.group else ''}{each} (absmax/127, round half to even)"

    @property
    def bits(self) -> str:
        """See `Rounding`."""
        return f"at 8 bits with a float32 scale for each {f'{self.group} weights' if self.group else 'output channel'}"

    def round_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Conversion`."""
        if self.group is None:
            return round_int8(rows, dim=1)
        check_groups(rows.shape[1], self.group, name=self.name)
        return round_int8(rows.reshape(-1, self.group), dim=1).reshape(rows.shape)

    def size(self, rows: int, columns: int) -> dict[str, int]:
        """See `Conversion`."""
        return {"I8": rows * columns, "F32": 4 * rows * (columns // self.group if self.group else 1)}


def round_int8(weight: torch.Tensor, *, dim: int) -> torch.Tensor:
    """Round to a symmetric 8-bit grid over `dim`, the input dimension, and back to the weight's own dtype.

    Each output channel has the scale absmax/127 (float32); a channel of zeros stays zero. Halves round to even.
    """
    values = weight.detach().float()
    scale = values.abs().amax(dim=dim, keepdim=True) / 127
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (values / scale).round_().clamp_(-127, 127).mul_(scale).to(weight.dtype)


CONVERSION = Int8()
