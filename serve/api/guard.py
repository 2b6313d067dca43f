"""What every request passes first: key, body limit, room, drain; and what is noted when it ends.

Pure ASGI, so that a client's going away reaches the routes.
"""

from __future__ import annotations

import hmac
import json
import logging
import time
import uuid
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.api.sending import error_reply
from serve.errors import BadRequest, Draining, Overloaded, ServeError, TooLarge, Unauthorized
from serve.state import ServerState

log = logging.getLogger("serve.access")
_RETRY_SECONDS = 1.0


class Guard:
    """Wraps the application. Requests that compute (POST) are counted against the limit."""

    def __init__(self, app: ASGIApp, *, state: ServerState, paths: frozenset[str]) -> None:
        self._app, self._state, self._paths = app, state, paths
        self._busy = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        note = _Note(scope, send)
        self._state.metrics.in_flight.inc()
        try:
            await self._pass(scope, receive, note.send)
        finally:
            self._state.metrics.in_flight.dec()
            note.write(self._state, self._paths)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        config = self._state.config
        try:
            headers = Headers(scope=scope)
            self._authorize(scope, headers)
            if self._state.draining and scope["path"] != "/metrics":
                raise Draining("the server is shutting down", retry_after=_RETRY_SECONDS)
            if scope["method"] == "POST" and self._busy >= config.max_concurrent_requests:
                raise Overloaded(
                    f"{self._busy} requests are being answered, as many as --max-concurrent-requests allows",
                    retry_after=_RETRY_SECONDS,
                )
            receive = await self._body(headers, receive)
        except ServeError as error:
            await error_reply(error)(scope, receive, send)
            return
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        self._busy += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._busy -= 1

    def _authorize(self, scope: Scope, headers: Headers) -> None:
        """The key of `Authorization: Bearer KEY`; /health is open, so that a watchdog needs none."""
        key = self._state.config.api_key
        if key is None or scope["path"] == "/health":
            return
        given = headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), key.encode()):
            raise Unauthorized("the API key is missing or wrong: send 'Authorization: Bearer KEY'")

    async def _body(self, headers: Headers, receive: Receive) -> Receive:
        """Refuse a body over the limit: by its declared length, or while a chunked one is read."""
        limit = self._state.config.max_body_bytes
        length = headers.get("content-length")
        if length is not None:
            if not length.isdigit():
                raise BadRequest("Content-Length is not a number")
            if int(length) > limit:
                raise TooLarge(f"the request body has {length} bytes, more than the limit of {limit}")
            return receive
        if not headers.get("transfer-encoding"):
            return receive
        chunks: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return _replay(message, receive)
            chunks.append(message.get("body", b""))
            if sum(map(len, chunks)) > limit:
                raise TooLarge(f"the request body has more bytes than the limit of {limit}")
            if not message.get("more_body"):
                return _replay({"type": "http.request", "body": b"".join(chunks), "more_body": False}, receive)


def _replay(first: Message, receive: Receive) -> Receive:
    """`receive` with a message put back in front."""
    queued = [first]

    async def again() -> Message:
        return queued.pop() if queued else await receive()

    return again


class _Note:
    """What is known of one request when it ends; gives the reply its X-Request-Id."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._began = time.perf_counter()
        self._status = 499  # no reply was begun: the client went away
        self._bytes = 0
        self._id = uuid.uuid4().hex

    async def send(self, message: Message) -> None:
        """Pass a message on."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", self._id.encode())]}
        self._bytes += len(message.get("body", b""))
        await self._send(message)

    def write(self, state: ServerState, paths: frozenset[str]) -> None:
        """One line of JSON, and the metrics. Paths that are no route are counted as one."""
        seconds = time.perf_counter() - self._began
        path = self._scope["path"]
        state.metrics.count_request(path if path in paths else "other", self._status, seconds)
        if log.isEnabledFor(logging.INFO):
            client = self._scope.get("client")
            line: dict[str, Any] = {
                "time": round(time.time(), 3),
                "id": self._id,
                "client": client[0] if client else None,
                "method": self._scope["method"],
                "path": path,
                "status": self._status,
                "seconds": round(seconds, 6),
                "bytes": self._bytes,
            }
            log.info(json.dumps(line))
