"""The checks by name, without importing anything that they check."""

from __future__ import annotations

from serve.wire import conversions

CONVERSIONS = tuple(f"@{name}" for name in conversions())
CHECKS = (
    "torch",
    "transformers",
    "server",
    "checkpoint",
    *CONVERSIONS,
    "gguf",
    "torchao",
    "bitsandbytes",
    "compressed-tensors",
    "llama.cpp",
)
