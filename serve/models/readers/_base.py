"""The contract of a reader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from serve.errors import LoadFailed


class Reader(ABC):
    """Reads a checkpoint folder that transformers does not.

    library: as it is called in messages, and for pip. weights: the file that holds them. pickled: whether reading that
    file can run code that is in it.
    """

    library: str
    weights: str
    pickled: bool = False

    @abstractmethod
    def fits(self, folder: Path) -> bool:
        """Whether the folder is one that this library wrote."""

    @abstractmethod
    def read(self, folder: Path, *, dtype: torch.dtype, device: str) -> tuple[Any, str]:
        """The model, a transformers one whose layers are the library's, and its scheme in words.

        Raises LoadFailed where the library is not installed; lets its own errors through.
        """

    def module(self, name: str) -> Any:
        """A module of the library. Raises LoadFailed with what to install."""
        try:
            return import_module(name)
        except ImportError as error:
            raise LoadFailed(
                f"the checkpoint was written by {self.library}, which is not installed: pip install {self.library}, or "
                "give --python an interpreter that has it"
            ) from error
