"""`@int3`, `@int3-gN`: weights as 3-bit integers, a scale a row or for every N weights."""

from __future__ import annotations

from serve.models.conversions._compressed import Compressed

CONVERSION = Compressed("int3", 3, "int")
