"""`@q3_k`: weights as blocks of GGUF's Q3_K, IQ4_NL where a row is not whole blocks."""

from __future__ import annotations

from serve.models.conversions._blocks import Blocks

CONVERSION = Blocks("Q3_K", fallback="IQ4_NL")
