"""One URL: sends requests, tries the passing failures again, adapts to overload. Replies come back unread."""

from __future__ import annotations

import os
import random
import ssl
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import orjson

from evalgate.dialects.base import Reply, Request
from evalgate.dialects.body import inner_status
from evalgate.endpoints.budget import Purse
from evalgate.endpoints.constancy import Served
from evalgate.endpoints.limiter import Limiter
from evalgate.endpoints.replies import BodyError, Room
from evalgate.endpoints.settings import EndpointSettings
from evalgate.errors import EndpointError, UsageError

T = TypeVar("T")
OVERLOADED = (429, 503, 529)
PASSING = (*OVERLOADED, 408, 502, 504, 520)
FALTERING = 500  # may pass, or be the server's answer to this very request: tried FALTERS times, then believed
FALTERS = 3
LONGEST_HOLD = 120.0  # seconds of a Retry-After that are believed
_KEEP_ALIVE = 2.0  # seconds; servers close idle connections after 5 (uvicorn) or more, and a request may cross that
_SHORT = 1 << 16  # bytes: an error inside a 200 is no longer


class EndpointDown(EndpointError):
    """No answer, or none but overload, for as long as the settings' patience lasts."""


class _Again(Exception):
    """A passing failure. hold: seconds the server asked for, None = not said."""

    def __init__(self, message: str, hold: float | None = None, reply: Reply | None = None) -> None:
        super().__init__(message)
        self.hold = hold
        self.reply = reply  # what to believe in the end


class Channel:
    """Requests to one URL; thread-safe. `key` None = no Authorization header.

    asked counts requests that were answered; overloads counts refusals for load, longest_hold is the longest
    Retry-After among them (seconds), rate_limits the headers that tell a limit, as they last came.
    served: what the replies name as the model.
    Raises UsageError where certificates or the proxy cannot be used.
    """

    def __init__(self, url: str, settings: EndpointSettings, *, key: str | None, trust_env: bool = True) -> None:
        self.url = url
        self.asked = 0
        self.overloads = 0
        self.longest_hold: float | None = None
        self.rate_limits: dict[str, str] = {}
        self.limiter = Limiter(settings.concurrency)
        self._count = threading.Lock()
        self._patience = settings.patience
        self._timeout = settings.timeout
        self.served = Served(url)
        self._room = Room()
        self._closed = threading.Event()
        headers = {"Content-Type": "application/json", "Accept-Encoding": "gzip, deflate", **dict(settings.headers)}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        options: dict[str, Any] = {"proxy": settings.proxy} if settings.proxy else {}
        try:
            self._http = httpx2.Client(
                headers=headers,
                timeout=httpx2.Timeout(settings.timeout, connect=min(10.0, settings.timeout)),
                limits=httpx2.Limits(
                    max_connections=settings.concurrency,
                    max_keepalive_connections=settings.concurrency,
                    keepalive_expiry=_KEEP_ALIVE,
                ),
                verify=_certificates(settings.ca_file, trust_env),
                trust_env=trust_env,
                follow_redirects=False,
                **options,
            )
        except (ValueError, httpx2.InvalidURL) as error:
            raise UsageError(f"the proxy cannot be used ({error}): write --proxy http://HOST:PORT") from None
        self._pool = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="endpoint")

    def close(self) -> None:
        """End the connections and the requests under way."""
        self._closed.set()
        self.limiter.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def send_all(self, requests: Sequence[Request], purse: Purse | None = None) -> tuple[Reply, ...]:
        """The replies of independent requests, in their order, sent at once as far as the limit allows.

        Raises as `send` does where one gets no answer.
        """
        if len(requests) == 1:
            return (self.send(requests[0], purse),)
        futures = [self._pool.submit(self.send, request, purse) for request in requests]
        try:
            return tuple(future.result() for future in futures)
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    def send(self, request: Request, purse: Purse | None = None) -> Reply:
        """The reply of one request, whatever its status; passing failures are tried again. `purse` pays for each try.

        Patience counts from the first failure, so that a request which took long and then lost its connection is
        tried again too. Raises EndpointDown when patience is at its end, Spent when the purse is.
        """
        failures, first, pause = 0, 0.0, 0.1
        while True:
            try:
                return self._once(request, purse)
            except _Again as error:
                failures, now = failures + 1, time.monotonic()
                first = first or now
                left = self._patience - (now - first)
                if error.reply is not None and (failures >= FALTERS or left <= 0):
                    return self._answered(error.reply)
                wait = pause + random.uniform(0, 0.1) if error.hold is None else error.hold
                # the last try comes when patience ends, however long the server would have us wait
                if left <= 0 or self._closed.wait(min(wait, left)):
                    raise EndpointDown(
                        f"{self.url}{request.path} gave no answer for {self._patience:g} seconds ({error}): "
                        "is it running?",
                        endpoint=self.url,
                    ) from None
                pause = min(2 * pause, 5.0)

    def drive(self, exchange: Generator[tuple[Request, ...], tuple[Reply, ...], T], purse: Purse | None = None) -> T:
        """What a dialect or a probe returns once all its requests were answered; `purse` pays, None = they are free.

        Raises what the generator and the purse raise, and EndpointDown where a request gets no answer.
        """
        try:
            requests = next(exchange)
            while True:
                requests = exchange.send(self.send_all(requests, purse))
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            exchange.close()

    def _exchange(self, request: Request, body: bytes | None) -> Reply:
        """One exchange, whole within the timeout: a reply that drips is cut off."""
        began = time.monotonic()
        until = began + self._timeout
        with (
            self._http.stream(request.method, self.url + request.path, content=body) as reply,
            self._room.body() as kept,
        ):
            for chunk in kept.decoded(reply.iter_raw(), reply.headers.get("content-encoding", "")):
                kept.add(chunk)
                if time.monotonic() > until:
                    raise _Again(f"the reply was not complete after {self._timeout:g} seconds")
            headers = {k.lower(): v for k, v in reply.headers.items()}
            return Reply(reply.status_code, headers, kept.whole(), began, time.monotonic())

    def _once(self, request: Request, purse: Purse | None) -> Reply:
        body = None if request.json is None else orjson.dumps(request.json)
        with self.limiter.slot() as began:
            if purse is not None:
                purse.pay()
            try:
                reply = self._exchange(request, body)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                if purse is not None:
                    purse.put_back()
                raise _Again(f"{type(error).__name__}: {error}") from error
            except httpx2.TransportError as error:
                raise _Again(f"{type(error).__name__}: {error}") from error
            except BodyError as error:
                raise EndpointError(f"{self.url}{request.path}: {error}", endpoint=self.url) from None
            except (httpx2.HTTPError, httpx2.InvalidURL, RuntimeError) as error:
                raise EndpointDown(f"{self.url}{request.path} cannot be asked ({error})", endpoint=self.url) from error
            status, hold = _status(reply), retry_after(reply.headers.get("retry-after"))
            self._note_limits(reply, status, hold)
            if status in OVERLOADED:
                self.limiter.overloaded(began, hold=None if hold is None else min(hold, self._patience))
            if status in PASSING or status == FALTERING:
                raise _Again(f"status {status}", hold, reply if status == FALTERING else None)
        if reply.status == 200:
            self.served.read(request.path, reply)
        return self._answered(reply)

    def _answered(self, reply: Reply) -> Reply:
        self.limiter.answered()
        with self._count:
            self.asked += 1
        return reply

    def _note_limits(self, reply: Reply, status: int, hold: float | None) -> None:
        told = {name: value for name, value in reply.headers.items() if "ratelimit" in name.replace("-", "")}
        with self._count:
            self.rate_limits |= told
            if status in OVERLOADED:
                self.overloads += 1
                self.longest_hold = max((h for h in (self.longest_hold, hold) if h is not None), default=None)


def _status(reply: Reply) -> int:
    """The reply's status; of an error inside a 200, which gateways send, the one that the error names."""
    if reply.status != 200 or len(reply.body) > _SHORT or b'"error"' not in reply.body:
        return reply.status
    try:
        body = orjson.loads(reply.body)
    except orjson.JSONDecodeError:
        return reply.status  # read where the answer is: there it is an error with a reason
    return (inner_status(body) if isinstance(body, dict) else None) or reply.status


def retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header (seconds or an HTTP date), at most LONGEST_HOLD; None where it says nothing."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            when = parsedate_to_datetime(value)
            seconds = (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
        except (ValueError, OverflowError):  # a date that no calendar has
            return None
    return min(max(seconds, 0.0), LONGEST_HOLD) if seconds == seconds else None


@cache  # reading the certificates takes 30 ms, for each URL of a run anew
def _usual_certificates(trust_env: bool, file: str | None, folder: str | None) -> ssl.SSLContext:
    return httpx2.create_ssl_context(trust_env=trust_env)


def _certificates(ca_file: str, trust_env: bool) -> ssl.SSLContext:
    if not ca_file:
        return _usual_certificates(trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
    if not Path(ca_file).is_file():
        raise UsageError(f"--ca-file {ca_file} is not a file: give the certificates to trust in PEM form")
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as error:
        raise UsageError(f"--ca-file {ca_file} holds no certificates ({error.reason}): give a PEM file") from None
