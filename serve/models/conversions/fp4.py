"""`@fp4`, `@fp4-gN`: weights as bitsandbytes' FP4, a scale for every 64 of them, or N."""

from __future__ import annotations

from serve.models.conversions._bitsandbytes import FourBit

CONVERSION = FourBit("fp4")
