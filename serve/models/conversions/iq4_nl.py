"""`@iq4_nl`: weights as blocks of GGUF's IQ4_NL."""

from __future__ import annotations

from serve.models.conversions._blocks import Blocks

CONVERSION = Blocks("IQ4_NL")
