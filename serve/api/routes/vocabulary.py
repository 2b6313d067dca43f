"""GET /v1/vocabulary: the bytes of every token, for replies that name tokens by their text."""

from __future__ import annotations

import base64
from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool

from serve.engine.runtime import HeadRuntime
from serve.models.spans import token_bytes
from serve.state import ServerState


def router(state: ServerState) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/v1/vocabulary")
    async def vocabulary(model: str | None = None) -> dict[str, Any]:
        """`tokens[id]`: base64 of the bytes that the token adds to a text."""
        return await run_in_threadpool(_tokens, state.engine.side(model))

    return routes


def _tokens(model: HeadRuntime) -> dict[str, Any]:
    tokenizer = model.loaded.tokenizer
    tokens = [base64.b64encode(token_bytes(tokenizer, i)).decode("ascii") for i in range(len(tokenizer))]
    return {"model": model.name, "tokens": tokens}
