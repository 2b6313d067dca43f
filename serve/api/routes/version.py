"""GET /version: what is running."""

from __future__ import annotations

import platform
from functools import cache
from importlib import metadata

from fastapi import APIRouter

from serve import VERSION
from serve.engine import kernels
from serve.state import ServerState

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy")


@cache
def versions() -> dict[str, str]:
    """Versions of what a number depends on; numba where it compiles the reductions."""
    found = {"evalgate": VERSION, **{name: metadata.version(name) for name in _PACKAGES}}
    if kernels.kernels() is not None:
        found["numba"] = metadata.version("numba")
    return {"python": platform.python_version(), **found}


def router(state: ServerState) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/version")
    async def version() -> dict[str, str]:
        """Package versions by name; `version` is the server's own."""
        found = versions()
        return {"version": found["evalgate"], **found}

    return routes
