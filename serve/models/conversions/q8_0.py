"""`@q8_0`: weights as blocks of GGUF's Q8_0."""

from __future__ import annotations

from serve.models.conversions._blocks import Blocks

CONVERSION = Blocks("Q8_0")
