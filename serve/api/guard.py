"""What every request passes first: host, key, drain, body, room; and what is noted when it ends.

Pure ASGI, so that a client's going away reaches the routes.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
import uuid
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.api.sending import error_reply
from serve.errors import BadRequest, Draining, Forbidden, Overloaded, ServeError, TooLarge, TooSlow, Unauthorized
from serve.state import ServerState

log = logging.getLogger("serve.access")
_RETRY_SECONDS = 1.0
_BODIES = 4  # times the limit of one body: what all arriving ones may hold together


class Guard:
    """Wraps the application. Requests that compute (POST) are counted against the limit."""

    def __init__(self, app: ASGIApp, *, state: ServerState, paths: frozenset[str]) -> None:
        self._app, self._state, self._paths = app, state, paths
        self._busy = 0
        self._held = 0  # bytes of bodies that are still arriving

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
        try:
            headers = Headers(scope=scope)
            self._check_host(headers)
            self._authorize(scope, headers)
            if self._state.draining and scope["path"] != "/metrics":
                raise Draining("the server is shutting down", retry_after=_RETRY_SECONDS)
            if scope["method"] == "POST":
                self._check_room()
                receive = await self._body(headers, receive)
                self._check_room()  # others may have come in the meantime
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

    def _check_room(self) -> None:
        if self._busy >= self._state.config.max_concurrent_requests:
            raise Overloaded(
                f"{self._busy} requests are being answered, as many as --max-concurrent-requests allows",
                retry_after=_RETRY_SECONDS,
            )

    def _check_host(self, headers: Headers) -> None:
        """Without a key, answer only to this machine's own names.

        A web page can point its own domain at 127.0.0.1 (DNS rebinding), and the browser then takes this server for
        the page's own. The name that it used stands in the Host header.
        """
        host = headers.get("host")
        if self._state.config.api_key is not None or host is None:
            return
        name = host.rpartition(":")[0] if re.fullmatch(r".*:[0-9]+", host) else host
        if not (name in ("localhost", "[::1]", self._state.config.host) or re.fullmatch(r"127(\.[0-9]{1,3}){3}", name)):
            raise Forbidden("the Host header names another server: use 127.0.0.1 or localhost, or start with a key")

    def _authorize(self, scope: Scope, headers: Headers) -> None:
        """The key of `Authorization: Bearer KEY`; /health is open, so that a watchdog needs none."""
        key = self._state.config.api_key
        if key is None or scope["path"] == "/health":
            return
        given = headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), key.encode()):
            raise Unauthorized("the API key is missing or wrong: send 'Authorization: Bearer KEY'")

    async def _body(self, headers: Headers, receive: Receive) -> Receive:
        """Read the whole body, within its limits of size and time, before it takes a place among the requests.

        Otherwise clients that send a byte now and then could hold every place.
        """
        limit = self._state.config.max_body_bytes
        length = headers.get("content-length")
        if length is not None:
            if not length.isdigit():
                raise BadRequest("Content-Length is not a number")
            if int(length) > limit:
                raise TooLarge(f"the request body has {length} bytes, more than the limit of {limit}")
        seconds = self._state.config.body_seconds
        try:
            first = await asyncio.wait_for(self._read(receive, limit), seconds)
        except TimeoutError:
            raise TooSlow(f"the request body did not arrive within {seconds:g} seconds") from None
        return _replay(first, receive)

    async def _read(self, receive: Receive, limit: int) -> Message:
        """The body in one message, or the news that the client went away."""
        chunks: list[bytes] = []
        held = 0
        try:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return message
                chunk = message.get("body", b"")
                chunks.append(chunk)
                held += len(chunk)
                self._held += len(chunk)
                if held > limit:
                    raise TooLarge(f"the request body has more bytes than the limit of {limit}")
                if self._held > _BODIES * limit:
                    raise Overloaded("too many large requests are arriving at once", retry_after=_RETRY_SECONDS)
                if not message.get("more_body"):
                    return {"type": "http.request", "body": b"".join(chunks), "more_body": False}
        finally:
            self._held -= held


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
        """One line of JSON, and the metrics. Paths without a route are counted together."""
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
