"""The cache folder: entries that are published whole or not at all, and verified before they are used."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

from serve.errors import LoadFailed
from serve.models.hashing import hash_file

MANIFEST = "manifest.json"
DEFAULT_WEIGHTS_LIMIT = 2 << 30


def cache_root() -> Path:
    """The folder that EVALGATE_CACHE names, else the user's cache folder for evalgate."""
    given = os.environ.get("EVALGATE_CACHE")
    return Path(given).expanduser() if given else user_cache_path("evalgate")


def weights_limit() -> int:
    """Largest dequantized model to keep, in bytes (EVALGATE_CACHE_WEIGHTS, 0 = keep none).

    Raises LoadFailed where the variable is not a whole number of bytes.
    """
    given = os.environ.get("EVALGATE_CACHE_WEIGHTS")
    if given is None:
        return DEFAULT_WEIGHTS_LIMIT
    if not given.isdecimal():
        raise LoadFailed(f"EVALGATE_CACHE_WEIGHTS is '{given}': give a whole number of bytes, 0 to keep none")
    return int(given)


def lock(name: str) -> FileLock:
    """Lock between processes for one entry, so that two starts do not build it twice."""
    folder = cache_root() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / f"{name.replace('/', '-')}.lock")


def verified(name: str) -> Path | None:
    """The entry's folder where it is complete: each file has the size and xxh3 its manifest names.

    A missing, cut or changed entry gives None (and is removed); the caller builds it again.
    """
    folder = cache_root() / name
    if not folder.exists():
        return None
    if _intact(folder):
        return folder
    shutil.rmtree(folder)
    return None


def publish(name: str, build: Callable[[Path], bool]) -> Path | None:
    """Let `build` fill a temporary folder, then rename it into place with its manifest.

    `build` returns whether what it wrote can be trusted; on False nothing is published and None returned.
    """
    target = cache_root() / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as temporary:
        folder = Path(temporary) / "entry"
        folder.mkdir()
        if not build(folder):
            return None
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        listing = {str(path.relative_to(folder)): [path.stat().st_size, hash_file(path)] for path in files}
        (folder / MANIFEST).write_text(json.dumps(listing))
        if target.exists():
            shutil.rmtree(target)
        folder.rename(target)
    return target


def _intact(folder: Path) -> bool:
    try:
        listing = json.loads((folder / MANIFEST).read_text())
        return bool(listing) and all(
            (folder / name).stat().st_size == size and hash_file(folder / name) == digest
            for name, (size, digest) in listing.items()
        )
    except (OSError, ValueError, TypeError, AttributeError):  # unreadable or not a manifest: not intact
        return False
