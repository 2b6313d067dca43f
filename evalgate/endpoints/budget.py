"""What may be spent on endpoints, and when to stop asking."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from evalgate.errors import UsageError


@dataclass(frozen=True)
class Budget:
    """What may be spent on endpoints; None = no limit."""

    requests: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """`requests=N`, `seconds=S` or both, separated by a comma. Raises UsageError for anything else."""
        found: dict[str, float] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*(requests|seconds)=([0-9]+(?:\.[0-9]+)?)\s*", part)
            if match is None or match[1] in found or (match[1] == "requests" and "." in match[2]):
                raise UsageError(f"--budget {text} is not a budget: write requests=N, seconds=S, or both with a comma")
            found[match[1]] = float(match[2])
        if not all(value > 0 for value in found.values()):
            raise UsageError(f"--budget {text} leaves nothing to spend: give more than 0")
        requests = found.get("requests")
        return cls(None if requests is None else int(requests), found.get("seconds"))


class Spending:
    """What is left of a budget; thread-safe. clock: seconds, monotonic.

    requests: sent, or set aside for windows under way.
    """

    def __init__(self, budget: Budget, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = budget
        self._clock = clock
        self._began = clock()
        self._lock = threading.Lock()
        self.requests = 0

    def begin(self, requests: int) -> bool:
        """Whether a window that takes at most `requests` may begin now; sets them aside if so."""
        seconds = self._budget.seconds
        if seconds is not None and self._clock() - self._began >= seconds:
            return False
        return self.take(requests)

    def take(self, requests: int) -> bool:
        """Whether `requests` more may be sent; counts them if so."""
        most = self._budget.requests
        with self._lock:
            if most is not None and self.requests + requests > most:
                return False
            self.requests += requests
            return True

    def give_back(self, requests: int) -> None:
        """Undo a `take` of what was not sent."""
        with self._lock:
            self.requests -= requests


class Spent(Exception):
    """The budget has no request left for what must be asked again."""


class Purse:
    """What one source may be asked about one window: what was set aside for it, then what the run has left."""

    def __init__(self, spending: Spending, requests: int) -> None:
        self._spending = spending
        self._lock = threading.Lock()
        self._left = requests

    def pay(self) -> None:
        """Count one request before it is sent. Raises Spent where there is none left."""
        with self._lock:
            if self._left:
                self._left -= 1
            elif not self._spending.take(1):
                raise Spent

    def put_back(self) -> None:
        """Undo a `pay`: nothing was sent."""
        with self._lock:
            self._left += 1

    def close(self) -> None:
        """Give back what was not needed."""
        with self._lock:
            self._spending.give_back(self._left)
            self._left = 0
