"""uvicorn with a graceful end: SIGTERM stops new requests and lets the running ones finish."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from serve.errors import LoadFailed

KEEP_ALIVE = 75  # seconds: longer than clients keep an idle connection, so that none is closed under a request


class DrainingServer(uvicorn.Server):
    """Ends normally after SIGTERM or SIGINT, so that the caller can clean up; a second SIGINT ends it at once."""

    def __init__(self, app: ASGIApp, *, drain_seconds: int, on_exit: Callable[[], None]) -> None:
        """on_exit is called when a signal asks for the end, before running requests are waited for."""
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=drain_seconds,
            timeout_keep_alive=KEEP_ALIVE,
            lifespan="off",
        )
        super().__init__(config)
        self._on_exit = on_exit
        # asyncio warns where a client left while chunks were on their way to it, which is nothing to act on
        logging.getLogger("asyncio").setLevel(logging.ERROR)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take no new request."""
        self._on_exit()
        super().handle_exit(sig, frame)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Listen to signals while serving. Unlike uvicorn's own, it does not raise them again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def log_requests(target: str | None) -> None:
    """Write the access log to a file, or to standard error for "-". Raises LoadFailed where it cannot."""
    if target is None:
        return
    try:
        handler = logging.StreamHandler() if target == "-" else logging.FileHandler(target, encoding="utf-8")
    except OSError as error:
        raise LoadFailed(f"cannot write the access log {target} ({error.strerror}): choose another file") from None
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger("serve.access")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
