"""`@int2`, `@int2-gN`: weights as 2-bit integers, a scale a row or for every N weights."""

from __future__ import annotations

from serve.models.conversions._compressed import Compressed

CONVERSION = Compressed("int2", 2, "int")
