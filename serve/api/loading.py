"""What the server answers while its models are loading: 503, so that whoever watches it sees that it is there."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from serve.api.sending import error_reply
from serve.errors import Draining

_RETRY_SECONDS = 1.0


class Loading:
    """An application that stands in for another one until that is there."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request: the application's, or 503."""
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await error_reply(Draining("loading the models", retry_after=_RETRY_SECONDS))(scope, receive, send)
