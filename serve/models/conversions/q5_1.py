"""`@q5_1`: weights as blocks of GGUF's Q5_1."""

from __future__ import annotations

from serve.models.conversions._blocks import Blocks

CONVERSION = Blocks("Q5_1")
