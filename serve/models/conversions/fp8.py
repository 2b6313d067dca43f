"""`@fp8`: weights as 8-bit floats (E4M3), a scale a row."""

from __future__ import annotations

from serve.models.conversions._compressed import Compressed

CONVERSION = Compressed("fp8", 8, "float")
