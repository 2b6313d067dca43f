"""Conversions on load (`SPEC@NAME`), one file each: a second model made from a loaded one.

A file `NAME.py` here is the conversion `@NAME`: the server's spec parser, the command line's completion and its help
list the files. It defines `CONVERSION`. Files whose names start with `_` are what the conversions share.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from serve.config import Recipe
from serve.errors import LoadFailed
from serve.models.conversions._base import Conversion, Part
from serve.models.scheme import is_quantized

__all__ = ["Conversion", "Part", "convert", "find"]


def find(text: str) -> Conversion:
    """The conversion of a spec: a name of `serve.wire.conversions()`, with a group size, or a recipe.

    Raises LoadFailed where the conversion has no groups, or not of that size.
    """
    from serve.models.conversions._rounding import Mixed

    recipe = Recipe.parse(text)
    return Mixed(recipe, _one) if recipe.layers else _one(recipe.base)


def _one(name: str) -> Conversion:
    stem, _, group = name.partition("-g")
    found: Conversion = import_module(f"{__name__}.{stem}").CONVERSION
    return found.grouped(int(group)) if group else found


def convert(model: Any, conversion: str, *, name: str) -> tuple[Any, str]:
    """The converted model, which shares every tensor that does not change, and the text that names the scheme.

    Raises LoadFailed for a quantized model or one without anything to convert; `name` is the spec, for messages.
    """
    if is_quantized(model):
        raise LoadFailed(f"'{name}' is already quantized: @{conversion} converts unquantized checkpoints only")
    return find(conversion).apply(model, name=name)
