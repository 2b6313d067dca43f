"""Windows shared out among the URLs of one source; a URL that dies gives its own back."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from evalgate.core import Window
from evalgate.dialects.base import WindowScores
from evalgate.endpoints.budget import Purse, Spent
from evalgate.endpoints.channel import Channel, EndpointDown
from evalgate.endpoints.source import EndpointSource

Wanted = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class Answered:
    """One window's answer from source `source` (scores None: the budget ended before), or what ended the work."""

    source: int
    window: int
    scores: WindowScores | None = None
    error: BaseException | None = None


_Item = tuple[Window, Wanted, Purse | None]


class Work:
    """Threads that ask one source; answers and errors go to `done` as they come.

    When a URL gives no answer for its patience, its window goes to the others; when the last one dies, the
    error of that one is delivered. lost: URLs that died.
    """

    def __init__(self, number: int, source: EndpointSource, done: queue.SimpleQueue[Answered]) -> None:
        self._number = number
        self._source = source
        self._done = done
        self._todo: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._dead: set[str] = set()
        self._lock = threading.Lock()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._run, args=(channel,), daemon=True)
            for channel in source.channels
            for _ in range(source.windows_at_once)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def capacity(self) -> int:
        """Windows that can be asked about at once."""
        return len(self._threads)

    @property
    def lost(self) -> tuple[str, ...]:
        """URLs that died, in alphabetical order."""
        return tuple(sorted(self._dead))

    def put(self, window: Window, wanted: Wanted | None = None, purse: Purse | None = None) -> None:
        """Hand in a window; `purse` pays for it, wherever it is asked about."""
        self._todo.put((window, wanted or {}, purse))

    def stop(self) -> None:
        """Take no more windows; those under way end with their channels."""
        self._stopped = True
        for _ in self._threads:
            self._todo.put(None)

    def _run(self, channel: Channel) -> None:
        while not self._stopped and channel.url not in self._dead:
            item = self._todo.get()
            if item is None:
                return
            if channel.url in self._dead:
                self._todo.put(item)
                return
            window, wanted, purse = item
            try:
                scores = self._source.score(channel, window, wanted, purse=purse)
            except EndpointDown as error:
                self._bury(channel, item, error)
                return
            except Spent:
                scores = None
            except BaseException as error:
                self._done.put(Answered(self._number, window.index, error=error))
                return
            if purse is not None:
                purse.close()
            self._done.put(Answered(self._number, window.index, scores))

    def _bury(self, channel: Channel, item: _Item, error: EndpointDown) -> None:
        """Give the window back; the last URL to die tells."""
        with self._lock:
            self._dead.add(channel.url)
            alone = len(self._dead) == len(self._source.channels)
        if alone:
            self._done.put(Answered(self._number, item[0].index, error=error))
        else:
            self._todo.put(item)
