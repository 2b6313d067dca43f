"""What the server answers while its models are loading: 503 and what it is doing, so that whoever watches it knows.

It imports no torch, because importing that is a good part of loading.
"""

from __future__ import annotations

import time

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.errors import Draining

_RETRY_SECONDS = "1"


class Loading:
    """An application that stands in for another one until that is there."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None
        self.stage = ""  # what is being done
        self._busy, self._last = 0, time.monotonic()

    def ready(self, app: ASGIApp) -> None:
        """Let the application answer from now on."""
        self.app, self._last = app, time.monotonic()

    def idle_seconds(self) -> float:
        """How long ago the last request ended; 0 while one is answered. Asking for /health is no use of the server."""
        return 0.0 if self._busy else time.monotonic() - self._last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request: the application's, or 503."""
        if self.app is not None:
            used = scope["type"] != "http" or scope["path"] != "/health"
            self._busy += used
            try:
                await self.app(scope, receive, send)
            finally:
                self._busy -= used
                self._last = time.monotonic() if used else self._last
        elif scope["type"] == "http":
            refusal = Draining(f"loading the models{': ' if self.stage else ''}{self.stage}")
            headers = {"Retry-After": _RETRY_SECONDS}
            reply = JSONResponse({"error": refusal.body()}, status_code=refusal.status, headers=headers)
            await reply(scope, receive, send)
