"""`@dequantized`: a quantized checkpoint with its weights unpacked on load, so that it rounds no activations."""

from __future__ import annotations

from typing import Any

from serve.errors import LoadFailed
from serve.models.conversions._base import Conversion


class Dequantized(Conversion):
    """What is left is the error of the weights; the checkpoint as it loads has that of its kernels besides."""

    dequantizes = True

    def apply(self, model: Any, *, name: str) -> tuple[Any, str]:
        """Refuse a model that has nothing to unpack: a quantized one is read again in its place."""
        raise LoadFailed(f"'{name}' has no packed weights: there is nothing to dequantize, leave @dequantized out")


CONVERSION = Dequantized()
