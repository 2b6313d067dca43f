"""What the routes share: the engine, and how a coroutine waits for the engine's thread."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from serve.config import ServerConfig
from serve.engine.loop import Engine
from serve.engine.metrics import Metrics
from serve.errors import ClientGone

_POLL = 0.5  # seconds between two looks at whether the client is still there


@dataclass
class ServerState:
    """The running server. draining: it takes no new request."""

    engine: Engine
    config: ServerConfig
    metrics: Metrics
    started: float = field(default_factory=time.time)
    draining: bool = False

    @staticmethod
    def json(body: dict[str, Any]) -> Response:
        """A reply. Raises ValueError for NaN and infinities, which are not JSON."""
        text = json.dumps(body, allow_nan=False, separators=(",", ":"))
        return Response(text.encode("ascii"), media_type="application/json")


class Answer:
    """A value that the engine's thread delivers to a waiting coroutine."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[object] = self._loop.create_future()

    def deliver(self, value: object) -> None:
        """Set the value (an exception is raised in the waiter); callable from any thread, only once."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._set, value)

    def _set(self, value: object) -> None:
        if self._future.done():
            return
        if isinstance(value, Exception):
            self._future.set_exception(value)
        else:
            self._future.set_result(value)

    async def wait(self, request: Request, cancel: Callable[[], None]) -> object:
        """The value; when the client disconnects first, `cancel` is called and ClientGone raised."""
        try:
            while True:
                done, _ = await asyncio.wait([self._future], timeout=_POLL)
                if done:
                    return self._future.result()
                if await request.is_disconnected():
                    raise ClientGone
        except (ClientGone, asyncio.CancelledError):
            cancel()
            raise
