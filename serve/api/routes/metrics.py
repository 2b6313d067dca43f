"""GET /metrics: Prometheus text."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from serve.state import ServerState


def router(state: ServerState) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Requests, tokens, step times, queue and KV use."""
        return Response(generate_latest(state.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return routes
