"""The checks by name, without importing anything that they check."""

from __future__ import annotations

from serve.wire import TRIED_CONVERSIONS

CONVERSIONS = tuple(f"@{name}" for name in TRIED_CONVERSIONS)
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
