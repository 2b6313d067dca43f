"""Conversions on load (`SPEC@NAME`), one file each: a second model made from a loaded one.

A file `NAME.py` here is the conversion `@NAME`: the server's spec parser, the command line's completion and its help
list the files. It defines `CONVERSION`. Files whose names start with `_` are what the conversions share.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from serve.errors import LoadFailed
from serve.models.conversions._base import Conversion
from serve.models.scheme import is_quantized

__all__ = ["Conversion", "convert", "find"]


def find(name: str) -> Conversion:
    """The conversion `@name`, one of `serve.wire.conversions()`."""
    found: Conversion = import_module(f"{__name__}.{name}").CONVERSION
    return found


def convert(model: Any, conversion: str, *, name: str) -> tuple[Any, str]:
    """The converted model, which shares every tensor that does not change, and the text that names the scheme.

    Raises LoadFailed for a quantized model or one without anything to convert; `name` is the spec, for messages.
    """
    if is_quantized(model):
        raise LoadFailed(f"'{name}' is already quantized: @{conversion} converts unquantized checkpoints only")
    return find(conversion).apply(model, name=name)
