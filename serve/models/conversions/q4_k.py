"""`@q4_k`: weights as blocks of GGUF's Q4_K, Q5_0 where a row is not whole blocks."""

from __future__ import annotations

from serve.models.conversions._blocks import Blocks

CONVERSION = Blocks("Q4_K", fallback="Q5_0")
