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
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar

import torch

from serve.models.load import LoadedModel

KINDS = {"packed": "PackedRunner", "tiled": "TiledRunner", "padded": "PaddedRunner", "alone": "AloneRunner"}


class UnsupportedModel(Exception):
    """The model needs something that a runner does not do; another runner may."""


@dataclass(frozen=True)
class Segment:
    """Rows [row, row + length) of a forward: tokens [start, start + length) of one sequence.

    `pages`: its block table, one page per token of [0, start + length); empty for a sequence that starts here
    (start = 0) and keeps nothing. `stored`: the pages hold the keys and values of these tokens already; they are read,
    not written.
    """

    row: int
    length: int
    start: int = 0
    pages: Sequence[int] = ()
    stored: bool = False


class Runner(ABC):
    """Runs the body of one model. One forward at a time, on the engine's thread.

    name: as reported. keeps_kv: keys and values survive a forward, in pages. needs_pages: a segment without pages
    cannot run.
    """

    name: ClassVar[str]
    keeps_kv: ClassVar[bool]
    needs_pages: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, loaded: LoadedModel) -> None:
        """Prepare the model. Raises UnsupportedModel where this runner cannot run it."""

    @abstractmethod
    def forward(self, tokens: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        """Hidden rows [len(tokens), size], in the order of `tokens`; the segments tile [0, len(tokens))."""

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
