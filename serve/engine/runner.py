"""The contract of the runners: tokens of several sequences in, hidden rows out.

Four runners implement it, from the quickest to the most careful one:

    packed   sequences side by side without padding, keys and values in pages
    tiled    packed, but every kernel in one fixed shape, so that no bit depends on the batch (`--deterministic`)
    padded   the model's own forward on right-padded batches; keeps nothing between forwards
    alone    padded, one sequence at a time

`selfcheck.prepare` chooses one for a model by comparing it with the model's own forward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import ClassVar

import numpy as np
import torch

from serve.engine.lengths import Lengths
from serve.engine.transfer import upload
from serve.models.load import LoadedModel

KINDS = {"packed": "PackedRunner", "tiled": "TiledRunner", "padded": "PaddedRunner", "alone": "AloneRunner"}


class UnsupportedModel(Exception):
    """The model needs something that a runner does not do; another runner may."""


@dataclass(frozen=True)
class Segment:
    """Rows [row, row + length) of a forward: tokens [start, start + length) of one sequence.

    `pages`: its block table, one page per token of [0, start + length); empty for a sequence that starts here
    (start = 0) and keeps nothing. `stored`: the pages hold the keys and values of these tokens already; they are read,
    not written. `total`: tokens of the whole sequence, where more of it is to come (0 = it ends with this segment).
    """

    row: int
    length: int
    start: int = 0
    pages: Sequence[int] = ()
    stored: bool = False
    total: int = 0

    @property
    def whole(self) -> int:
        """Tokens of the sequence that this segment is a part of."""
        return self.total or self.start + self.length


class Runner(ABC):
    """Runs the body of one model. One forward at a time, on the engine's thread, unless it is `parallel`.

    name: as reported. keeps_kv: keys and values survive a forward, in pages. needs_pages: a segment without pages
    cannot run.
    """

    name: ClassVar[str]
    keeps_kv: ClassVar[bool]
    needs_pages: ClassVar[bool] = False

    def __init__(self, loaded: LoadedModel) -> None:
        """Prepare the model. Raises UnsupportedModel where this runner cannot run it."""
        self.lengths = Lengths(loaded)

    @property
    def parallel(self) -> bool:
        """Whether several threads may each be in a forward, over segments without pages, at once."""
        return False

    def regime(self, n: int) -> int:
        """Sequences of two lengths share a forward, keys, values and scores only where this gives the same number."""
        return self.lengths.regime(n)

    def forward(self, tokens: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        """Hidden rows [len(tokens), size], in the order of `tokens`; the segments tile [0, len(tokens))."""
        regimes: dict[int, list[Segment]] = {}
        for segment in segments:
            regimes.setdefault(self.regime(segment.whole), []).append(segment)
        if len(regimes) == 1:
            with self.lengths.held(segments[0].whole):
                return self._forward(tokens, segments)
        rows: list[int] = []
        parts = []
        for group in regimes.values():
            own: list[int] = []
            moved = []
            for segment in group:
                moved.append(replace(segment, row=len(own)))
                own.extend(range(segment.row, segment.row + segment.length))
            with self.lengths.held(group[0].whole):
                parts.append(self._forward([tokens[row] for row in own], moved))
            rows.extend(own)
        hidden = torch.cat(parts)
        (back,) = upload(hidden.device, np.array(rows, dtype=np.int64))
        return torch.empty_like(hidden).index_copy_(0, back, hidden)

    @abstractmethod
    def _forward(self, tokens: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        """The same for segments of one regime."""

    @property
    def token_bytes(self) -> int:
        """Bytes that one token's keys and values take over all layers; known after the first forward."""
        return 0

    @abstractmethod
    def allocate(self, pages: int) -> None:
        """Make room for the keys and values of `pages` tokens; what was stored before is lost."""


def make_runner(kind: str, loaded: LoadedModel) -> Runner:
    """The runner called `kind` (a key of KINDS) over a model. Raises UnsupportedModel where it cannot run it."""
    made: Runner = getattr(import_module(f"serve.engine.{kind}"), KINDS[kind])(loaded)
    return made
