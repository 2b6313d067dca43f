"""`@q6_k`: weights as blocks of GGUF's Q6_K, Q8_0 where a row is not whole blocks."""

from __future__ import annotations

from serve.models.conversions._blocks import Blocks

CONVERSION = Blocks("Q6_K", fallback="Q8_0")
