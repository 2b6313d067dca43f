"""`@q2_k`: weights as blocks of GGUF's Q2_K, IQ4_NL where a row is not whole blocks."""

from __future__ import annotations

from serve.models.conversions._blocks import Blocks

CONVERSION = Blocks("Q2_K", fallback="IQ4_NL")
