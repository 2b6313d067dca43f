"""`@nvfp4`: weights as 4-bit floats (E2M1), an 8-bit scale for every 16 of them and one for all."""

from __future__ import annotations

from serve.models.conversions._compressed import Compressed

CONVERSION = Compressed("nvfp4", 4, "float", block=16, tensor_scale=True, scale="float8_e4m3fn")
