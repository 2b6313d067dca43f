"""`@q5_k`: weights as blocks of GGUF's Q5_K, Q5_1 where a row is not whole blocks."""

from __future__ import annotations

from serve.models.conversions._blocks import Blocks

CONVERSION = Blocks("Q5_K", fallback="Q5_1")
