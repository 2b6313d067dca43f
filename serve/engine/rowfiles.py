"""Hidden rows of unanswered jobs in files, by the hash of all that they depend on.

A file is one line of JSON (shape, dtype, hash) and then the rows. One that is cut or altered counts as missing.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import xxhash

from serve.errors import ServeError
from serve.models.hashing import combine

_ABANDONED = 14 * 86400.0  # seconds after which what nobody resumed is removed
_LONGEST_HEAD = 4096  # bytes


class RowFiles:
    """The rows of one model, in a folder of its own under `root`."""

    FOLDER = "streams"  # of the cache

    def __init__(self, root: Path, facts: Any) -> None:
        """facts: a JSON value of what all rows of the model depend on. Folders that were left behind are removed."""
        self.folder = root / combine([json.dumps(facts, default=str)])
        with suppress(OSError):
            for folder in root.iterdir():
                if folder.is_dir() and time.time() - folder.stat().st_mtime > _ABANDONED:
                    shutil.rmtree(folder, ignore_errors=True)

    @staticmethod
    def name_of(batch: Sequence[Any]) -> str:
        """The name of a batch of windows: a hash of their ids and positions."""
        return combine(f"{window.ids}{window.positions}" for window in batch)

    def has(self, name: str) -> bool:
        """Whether rows of that name were written, damaged or not."""
        return (self.folder / name).is_file()

    def read(self, name: str) -> torch.Tensor | None:
        """The rows [n, size], None where they are not there or damaged."""
        path = self.folder / name
        try:
            with path.open("rb") as stream:
                head = json.loads(stream.readline(_LONGEST_HEAD))
                rows = torch.empty(head["shape"], dtype=getattr(torch, head["dtype"]))
                view = _bytes(rows)
                if stream.readinto(view) != len(view) or stream.read(1) or _hash(view) != head["hash"]:
                    raise ValueError
                return rows
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError):
            with suppress(OSError):
                path.unlink()
            return None

    def write(self, name: str, rows: torch.Tensor) -> None:
        """Keep rows, whole or not at all. Raises ServeError where the disk refuses."""
        held = rows.detach().cpu().contiguous()
        view = _bytes(held)
        head = {"shape": list(held.shape), "dtype": str(held.dtype).removeprefix("torch."), "hash": _hash(view)}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as stream:
                try:
                    stream.write(json.dumps(head).encode() + b"\n")
                    stream.write(view)
                except BaseException:
                    Path(stream.name).unlink(missing_ok=True)
                    raise
            os.replace(stream.name, self.folder / name)  # noqa: PTH105 (a name, not a path)
        except OSError as error:
            raise ServeError(
                f"cannot write hidden rows to {self.folder} ({error.strerror}): free space there, or set "
                f"EVALGATE_CACHE to "
                "a larger disk; run the same command to resume"
            ) from error

    def remove(self, name: str) -> None:
        """Remove rows that are no longer needed."""
        with suppress(OSError):
            (self.folder / name).unlink()
        with suppress(OSError):
            self.folder.rmdir()  # where it is empty


def _bytes(rows: torch.Tensor) -> memoryview:
    size = rows.numel() * rows.element_size()
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(rows.data_ptr())).cast("B")


def _hash(view: memoryview) -> str:
    return str(xxhash.xxh3_128_hexdigest(view))
