"""Whether the embedded server still lives while it computes: a request may take long, a stopped server for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SILENCE = 120.0  # seconds without an answer after which the server counts as hung
BEAT = 10.0  # seconds between two questions


class Heartbeat:
    """Asks `alive` now and then while requests are under way; calls `lost` once when it was silent too long.

    alive: whether the server answers a small question in time. lost: ends the server, and with it the requests that
    wait for it. hung: whether that happened.
    """

    def __init__(
        self, alive: Callable[[], bool], lost: Callable[[], None], *, silence: float = SILENCE, beat: float = BEAT
    ) -> None:
        self._alive = alive
        self._lost = lost
        self._silence = silence
        self._beat = beat
        self._changed = threading.Condition()
        self._under_way = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self.hung = False

    @contextmanager
    def request(self) -> Iterator[None]:
        """A request is under way inside the block."""
        with self._changed:
            self._under_way += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1

    def close(self) -> None:
        """Ask no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        heard = time.monotonic()
        while True:
            with self._changed:
                while not self._under_way and not self._closed:
                    self._changed.wait()
                    heard = time.monotonic()  # nobody asked, so nothing was missed
                self._changed.wait_for(lambda: self._closed, timeout=self._beat)
                if self._closed:
                    return
            if self._alive():
                heard = time.monotonic()
            elif time.monotonic() - heard > self._silence:
                self.hung = True
                self._lost()
                return
