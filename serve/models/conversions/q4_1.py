"""`@q4_1`: weights as blocks of GGUF's Q4_1."""

from __future__ import annotations

from serve.models.conversions._blocks import Blocks

CONVERSION = Blocks("Q4_1")
