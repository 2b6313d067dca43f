"""The cache of references' hidden states: how large it may be, what is in it, and how it is emptied.

The server writes it (serve/engine/kept.py), a file for each batch of windows, since it alone knows what the bits of a
row depend on. Here it is only counted and removed.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from evalgate.errors import InputError, UsageError
from evalgate.paths import cache_path, heads_folder

VARIABLE = "EVALGATE_CACHE_HIDDEN"
MOST = 10 << 30  # bytes, where the variable does not say otherwise
_SHARE = 10  # of the disk's free space, at most one part in so many
_UNITS = {"K": 10, "M": 20, "G": 30, "T": 40}


@dataclass(frozen=True)
class Kept:
    """The kept hidden states of one model. bytes: of its rows. used: when last, UTC."""

    spec: str
    batches: int
    bytes: int
    used: str


@dataclass(frozen=True)
class Contents:
    """The whole cache. heads: files of output heads and their bytes; shared: bytes of those that traces hold too."""

    folder: str
    limit: int
    models: tuple[Kept, ...]
    heads: int
    head_bytes: int
    shared: int

    @property
    def bytes(self) -> int:
        """What emptying the cache would free."""
        return sum(model.bytes for model in self.models) + self.head_bytes - self.shared


def hidden_limit() -> int:
    """Bytes that may be kept: what EVALGATE_CACHE_HIDDEN says (512M, 20G, 0 = keep none), else 10 GiB or a tenth of the
    free disk, whichever is less.

    Raises UsageError where the variable is not a size.
    """
    given = os.environ.get(VARIABLE, "").strip()
    if given:
        shift = _UNITS.get(given[-1].upper(), 0)
        try:
            size = int(float(given[:-1] if shift else given) * (1 << shift))
        except (ValueError, OverflowError):
            size = -1
        if size < 0:
            raise UsageError(f"{VARIABLE} is '{given}': give a size such as 512M or 20G, or 0 to keep nothing")
        return size
    place = cache_path()
    nearest = next((folder for folder in (place, *place.absolute().parents) if folder.exists()), Path("/"))
    try:
        free = shutil.disk_usage(nearest).free
    except OSError:
        return 0
    return min(MOST, (free + contents_bytes()) // _SHARE)


def contents() -> Contents:
    """What is kept."""
    models = []
    for folder in sorted(_root().glob("*/")):
        files = [status for path in folder.glob("*.rows") if (status := _status(path)) is not None]
        if files:
            used = max(status.st_mtime for status in files)
            models.append(
                Kept(
                    spec=_spec(folder),
                    batches=len(files),
                    bytes=sum(status.st_size for status in files),
                    used=datetime.fromtimestamp(used, UTC).isoformat(timespec="seconds"),
                )
            )
    heads = [status for path in heads_folder().glob("*.safetensors") if (status := _status(path)) is not None]
    return Contents(
        folder=str(cache_path()),
        limit=hidden_limit(),
        models=tuple(models),
        heads=len(heads),
        head_bytes=sum(status.st_size for status in heads),
        shared=sum(status.st_size for status in heads if status.st_nlink > 1),
    )


def clear() -> None:
    """Remove all kept hidden states and heads. Traces keep theirs. Raises InputError where some cannot be removed."""
    for folder in (_root(), heads_folder()):
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise InputError(f"cannot remove {folder}: {error.strerror or error}", folder=str(folder)) from error


def contents_bytes() -> int:
    """Bytes of all kept files."""
    paths = [*_root().glob("*/*.rows"), *heads_folder().glob("*.safetensors")]
    return sum(status.st_size for path in paths if (status := _status(path)) is not None)


def _root() -> Path:
    return cache_path() / "hidden"


def _spec(folder: Path) -> str:
    """The model's spec as it was when its rows were written."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((folder / "about.json").read_bytes())["spec"])
    return "(not known)"


def _status(path: Path) -> os.stat_result | None:
    with suppress(OSError):
        return path.stat()
    return None
