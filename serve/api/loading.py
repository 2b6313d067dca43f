"""What the server answers while its models are loading: 503 and what it is doing, so that whoever watches it knows.

It imports no torch, because importing that is a good part of loading.
"""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.errors import Draining

_RETRY_SECONDS = "1"


class Loading:
    """An application that stands in for another one until that is there."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None
        self.stage = ""  # what is being done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request: the application's, or 503."""
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            refusal = Draining(f"loading the models{': ' if self.stage else ''}{self.stage}")
            headers = {"Retry-After": _RETRY_SECONDS}
            reply = JSONResponse({"error": refusal.body()}, status_code=refusal.status, headers=headers)
            await reply(scope, receive, send)
