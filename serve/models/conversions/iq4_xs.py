"""`@iq4_xs`: weights as blocks of GGUF's IQ4_XS, IQ4_NL where a row is not whole blocks."""

from __future__ import annotations

from serve.models.conversions._blocks import Blocks

CONVERSION = Blocks("IQ4_XS", fallback="IQ4_NL")
