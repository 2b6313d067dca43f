"""How many requests may be under way at once: additive increase, multiplicative decrease (AIMD, as in TCP)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Limiter:
    """A semaphore whose size adapts; thread-safe.

    Starts at `most`. An overload halves the size, once per round of requests (requests that were under way
    when the size last fell say nothing new), and holds new ones back for the seconds the server names; each
    answered request adds 1/size, up to `most`.
    """

    def __init__(self, most: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._size = float(most)
        self._under_way = 0
        self._round = 0  # grows with each decrease
        self._not_before = 0.0
        self._clock = clock
        self._changed = threading.Condition()
        self._closed = False

    @property
    def size(self) -> int:
        """Requests allowed at once now, at least 1."""
        return max(1, int(self._size))

    @contextmanager
    def slot(self) -> Iterator[int]:
        """Wait for a place; gives the round it belongs to, for `overloaded`."""
        with self._changed:
            while not self._closed:
                wait = self._not_before - self._clock()
                if wait <= 0 and self._under_way < self.size:
                    break
                self._changed.wait(min(wait, 0.5) if wait > 0 else 0.5)
            self._under_way += 1
            began = self._round
        try:
            yield began
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def answered(self) -> None:
        """A request was answered."""
        with self._changed:
            self._size = min(float(self._most), self._size + 1 / self._size)
            self._changed.notify_all()

    def overloaded(self, began: int, *, hold: float | None) -> None:
        """A request of round `began` was refused for load; hold: seconds to send nothing, None = not said."""
        with self._changed:
            if hold is not None:
                self._not_before = max(self._not_before, self._clock() + hold)
            if began == self._round:
                self._round += 1
                self._size = max(1.0, self._size / 2)

    def close(self) -> None:
        """Let every waiting request go, to fail on the closed client."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
