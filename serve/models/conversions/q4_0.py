"""`@q4_0`: weights as blocks of GGUF's Q4_0."""

from __future__ import annotations

from serve.models.conversions._blocks import Blocks

CONVERSION = Blocks("Q4_0")
