"""Rows of a recording by window; its shards are read when they are needed, and the latest are kept."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from evalgate.core import Window
from evalgate.errors import MismatchError

if TYPE_CHECKING:
    from evalgate.traces import PositionBatch, Trace


class TraceRows:
    """The rows of a trace. kept: shards in memory at most."""

    def __init__(self, trace: Trace, *, kept: int) -> None:
        self._trace = trace
        self._shard = lru_cache(maxsize=kept)(trace.shard)

    @cached_property
    def _shard_of(self) -> dict[int, int]:
        return self._trace.shard_of_window()

    def of(self, window: Window) -> PositionBatch:
        """The rows of a window's scored positions, which may be some of the recorded ones.

        Raises MismatchError where one was not recorded.
        """
        folder = self._trace.folder
        if window.index not in self._shard_of:
            raise MismatchError(f"{folder} has no rows for window {window.index}: record it again")
        shard = self._shard(self._shard_of[window.index])
        mine = np.flatnonzero(shard.window == window.index)
        mine = mine[np.isin(shard.position[mine], window.positions)]
        if shard.position[mine].tolist() != list(window.positions):
            raise MismatchError(f"{folder} has no rows for all positions of window {window.index}")
        return shard.take(mine)
