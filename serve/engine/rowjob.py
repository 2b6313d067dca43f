"""Work on the scored rows of one model, in the engine's turns: windows through the body, heads tile by tile.

What is made of a tile is the subclass's; a [positions, vocabulary] tensor never exists on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from serve.engine.pair import ScoreWindow, check_windows, next_batch, refuse_unscorable, scored_rows
from serve.engine.runtime import ModelRuntime

Arrays = dict[str, "np.ndarray[Any, np.dtype[Any]]"]
Place = tuple[int, int]  # index of the window in the job, and position in it


@dataclass
class RowJob(ABC):
    """Windows of one model, in order. `on_end` gets the arrays of all scored positions, or the error, once.

    Every array has one row per position, window by window; `window` is the index in the job.
    """

    model: ModelRuntime
    windows: Sequence[ScoreWindow]
    on_end: Callable[[Arrays | Exception], None]
    done: int = field(default=0, init=False)
    cancelled: bool = field(default=False, init=False)
    parts: list[Arrays] = field(default_factory=list, init=False)

    @abstractmethod
    def reduce_tile(self, logits: torch.Tensor, tokens: torch.Tensor, places: Sequence[Place]) -> Arrays:
        """Arrays of one tile: logits [rows, vocabulary], which the job may write into, and tokens [rows]."""

    def validate(self) -> None:
        """Raise BadRequest naming the window that cannot be scored."""
        check_windows([self.model], self.windows)

    @property
    def finished(self) -> bool:
        """Whether every window is done."""
        return self.done >= len(self.windows)

    def advance(self) -> None:
        """Do the next batch of windows."""
        first = self.done
        last = next_batch(self.windows, first, self.model.config.max_batch_tokens)
        part = self.windows[first:last]
        places = [(first + w, p) for w, window in enumerate(part) for p in window.positions]
        if places:
            with torch.inference_mode():
                self._reduce_all(scored_rows(self.model, part), places)
        self.done = last

    def columns(self) -> Arrays:
        """All rows so far."""
        if not self.parts:
            return {}
        return {name: np.concatenate([part[name] for part in self.parts]) for name in self.parts[0]}

    def _reduce_all(self, hidden: torch.Tensor, places: Sequence[Place]) -> None:
        tokens = torch.tensor([self.windows[w].ids[p] for w, p in places], device=hidden.device)
        for low, rows, logits in self.model.tiles(hidden):
            part = self.reduce_tile(logits, tokens[rows], [places[row] for row in rows])
            keys = np.array(places[low : low + self.model.rows_per_tile], dtype=np.int32)
            if len(keys) < len(rows):  # a copy, for a view would keep the rows that only fill the tile up
                part = {name: values[: len(keys)].copy() for name, values in part.items()}
            self.parts.append({"window": keys[:, 0], "position": keys[:, 1], **part})

    def refuse_unscorable(self, values: torch.Tensor, name: str, places: Sequence[Place]) -> None:
        """Raise ScoringFailed at the first row of `values` [rows] that is not finite, or that a mask went into."""
        refuse_unscorable(values, name, places, self.model.name)
