"""Checkpoints that only their own library reads, one file each.

Most quantizations are read by transformers, which knows them by `quantization_config`. A file here defines `READER`, an
instance of a subclass of `Reader`, for a folder that it does not know.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from serve.models.readers._base import Reader

__all__ = ["Reader", "find"]


def find(folder: Path) -> Reader | None:
    """The reader that a checkpoint folder needs; None where transformers reads it."""
    for file in sorted(Path(__file__).parent.glob("[!_]*.py")):
        reader: Reader = import_module(f"{__name__}.{file.stem}").READER
        if reader.fits(folder):
            return reader
    return None
