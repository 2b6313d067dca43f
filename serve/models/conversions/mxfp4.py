"""`@mxfp4`: weights as 4-bit floats (E2M1), a power of two for every 32 of them."""

from __future__ import annotations

from serve.models.conversions._compressed import Compressed

CONVERSION = Compressed("mxfp4", 4, "float", block=32, scale="uint8")
