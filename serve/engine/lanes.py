"""Lanes: threads that do whole pieces of a job side by side, each with its share of torch's threads.

A product on all threads and a sum over its logits take turns: at every change some thread waits for the slowest one,
and what Python does between them keeps all but one idle. In lanes one piece's sums run beside another one's products,
and nothing waits but for work. A piece gives the same bits in every lane, because each has the same number of threads.

There are two lanes, whatever the machine: each needs memory for tiles of its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

import torch

MOST = 2
Result = TypeVar("Result")
_here = threading.local()


class Lanes:
    """Threads of this process that take pieces of work in the order in which they are given."""

    def __init__(self, threads: int) -> None:
        """threads: torch's threads, to be shared out."""
        self.count = max(1, min(MOST, threads))
        self._share = max(1, threads // self.count)
        self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="lane", initializer=self._begin)
        self._ready = threading.Barrier(self.count + 1)
        # torch's setting is one of a thread and also what later threads start with: make the lanes first, then put the
        # latter back
        for _ in range(self.count):
            self._pool.submit(self._ready.wait)
        self._ready.wait()
        torch.set_num_threads(threads)

    def _begin(self) -> None:
        torch.get_num_threads()  # the first use in a thread takes over the setting of the process: not after ours
        torch.set_num_threads(self._share)

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Do a piece of work in a lane. It may wait for pieces that were given before it, not for later ones."""
        return self._pool.submit(_inferring, work)

    def run(self, pieces: Sequence[Callable[[], Result]]) -> list[Result]:
        """What each piece gives, in their order; raises what the first one of them raised that failed.

        Returns when none is running any more, since they share buffers.
        """
        waiting = [self.submit(piece) for piece in pieces]
        wait(waiting)
        return [each.result() for each in waiting]


def lanes() -> Lanes:
    """The lanes of this process for the calling thread's number of threads."""
    return _lanes(os.getpid(), torch.get_num_threads())


@cache
def _lanes(process: int, threads: int) -> Lanes:
    return Lanes(threads)


def buffer(role: str, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """An uninitialized float32 tensor [rows, columns] that the calling thread reuses for this role."""
    buffers: dict[tuple[str, str], torch.Tensor] = _here.__dict__.setdefault("buffers", {})
    key, size = (role, str(device)), rows * columns
    found = buffers.get(key)
    if found is None or found.numel() < size:
        buffers.pop(key, None)  # the smaller one goes before the larger one comes
        found = None
        found = buffers[key] = torch.empty(size, dtype=torch.float32, device=device)
    return found[:size].view(rows, columns)


def _inferring(work: Callable[[], Result]) -> Result:
    with torch.inference_mode():  # a setting of each thread
        return work()
