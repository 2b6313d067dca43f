"""GET /v1/streaming: how far the passes over streamed weights have come."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from serve.state import ServerState


def router(state: ServerState) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/v1/streaming")
    async def streaming() -> dict[str, list[dict[str, Any]]]:
        """The passes that are under way: model, pieces done of all, bytes read of all, and seconds left (or null)."""
        models = (model.streamed for model in state.engine.models.values())
        found = (streamed.progress() for streamed in models if streamed is not None)
        return {"passes": [progress for progress in found if progress is not None]}

    return routes
