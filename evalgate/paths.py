"""Where evalgate keeps things on this machine."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "EVALGATE_CACHE"


def cache_path() -> Path:
    """The cache folder: $EVALGATE_CACHE, else the user's cache folder of this platform."""
    import platformdirs

    given = os.environ.get(CACHE_VARIABLE)
    return Path(given) if given else platformdirs.user_cache_path("evalgate")


def heads_folder() -> Path:
    """Where output heads are kept, each under its SHA-256: traces on the same disk share them by links."""
    return cache_path().expanduser().absolute() / "heads"
