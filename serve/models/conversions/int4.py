"""`@int4`, `@int4-gN`: weights as 4-bit integers, a scale a row or for every N weights."""

from __future__ import annotations

from serve.models.conversions._compressed import Compressed

CONVERSION = Compressed("int4", 4, "int")
