"""JSON on its way out: errors in OpenAI's shape, and server-sent events (one document each, then [DONE])."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel

from serve.engine.loop import as_serve_error
from serve.errors import ServeError
from serve.wire import ErrorReply

DONE = b"data: [DONE]\n\n"
SCHEMAS = "#/components/schemas/{model}"


def streamed(chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """A stream as OpenAPI 3.2 describes one, event by event: JSON chunks (or an error), then [DONE].

    Adds to a route's `responses`; the application puts the chunk's own schema among the components.
    """
    documents = [{"$ref": SCHEMAS.format(model=model.__name__)} for model in (chunk, ErrorReply)]
    document = {"contentMediaType": "application/json", "contentSchema": {"anyOf": documents}}
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, document]}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {200: {"content": {"text/event-stream": {"itemSchema": event}}}}


class EventStream(StreamingResponse):
    """A stream of chunks. An error after the first byte is an event of its own, in OpenAI's shape."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[dict[str, Any]]) -> None:
        super().__init__(_events(chunks), headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})


async def _events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    try:
        async for chunk in chunks:
            yield event(chunk)
    except Exception as error:
        yield event({"error": as_serve_error(error).body()})
    yield DONE


def event(body: dict[str, Any]) -> bytes:
    """One event; the document is ASCII, so that half a surrogate pair cannot break it."""
    return b"data: " + json.dumps(body, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n\n"


def error_reply(error: ServeError, *, status: int | None = None) -> Response:
    """An error as a reply; the document is ASCII, so that half a surrogate pair in it cannot break it."""
    body = json.dumps({"error": error.body(status=status)}).encode("ascii")
    headers = {"Retry-After": f"{error.retry_after:g}"} if error.retry_after is not None else None
    return Response(body, status_code=status or error.status, headers=headers, media_type="application/json")
