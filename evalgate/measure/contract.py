"""The contract between a kind of measurement and the skeleton that runs it (evalgate.measure.run.carry_out)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from evalgate.core import SourceInfo, Window
from evalgate.measure.checks import check_request
from evalgate.measure.inputs import Inputs, identity_of
from evalgate.measure.noise import Itself
from evalgate.measure.pace import described
from evalgate.measure.request import Judge, Observer, RunRequest
from evalgate.measure.result import summed_up
from evalgate.store.partial import PartialRun, partial_root, partial_run
from evalgate.store.runs import Run, write_run

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Scores:
    """What the sources answered.

    windows: those that were answered. complete: False where a budget left some out; the answers are then kept for the
    same request with a larger budget. notes: what a reader of the figures must know.
    """

    windows: tuple[Window, ...]
    complete: bool = True
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TableScores(Scores):
    """Scores as the per-position table of a run.

    alternatives: both sides' likeliest ids at the worst positions (evalgate.store.alternatives), None = not known.
    """

    table: pa.Table
    alternatives: pa.Table | None = None


Kept = TypeVar("Kept")
Scored = TypeVar("Scored", bound=Scores)
Outcome = TypeVar("Outcome")


class Measurement(ABC, Generic[Kept, Scored, Outcome]):
    """One kind of measurement. The skeleton calls each method once, in this order.

    Kept: where answers are kept until the outcome is sealed. Scored: what scoring gives. Outcome: a run or a recording.
    """

    @abstractmethod
    def check(self) -> None:
        """Refuse what this kind cannot honour, before anything is read or started. Raises UsageError."""

    @abstractmethod
    def read(self, watch: Observer) -> None:
        """Read what needs no model: the text, or the recording."""

    def documents(self) -> Sequence[tuple[str, str]] | None:
        """Name and domain of each document that was read; None where only a model tells."""
        return None

    @abstractmethod
    def open(self, watch: Observer) -> AbstractContextManager[Sequence[SourceInfo]]:
        """Start or probe the sources, and close them after the block. Yields those that must share one vocabulary."""

    @abstractmethod
    def windows(self, watch: Observer) -> Inputs:
        """The windows of the text, and what else the numbers depend on."""

    @abstractmethod
    def resume(self, inputs: Inputs) -> AbstractContextManager[Kept]:
        """The answers that an interrupted measurement of the same inputs left, to which the new ones are added."""

    @abstractmethod
    def described(self) -> dict[str, Any]:
        """What its speed depends on, besides the machine: kind, models, device, windows."""

    @abstractmethod
    def is_new(self, kept: Kept) -> bool:
        """Whether nothing was answered before, so that how long it takes says how fast it is."""

    @abstractmethod
    def score(self, inputs: Inputs, kept: Kept, watch: Observer) -> Scored:
        """The scores of all windows; sources are asked only about those that are not in `kept`."""

    @abstractmethod
    def sum_up(self, inputs: Inputs, scores: Scored, watch: Observer) -> Outcome:
        """The outcome, not yet on disk."""

    @abstractmethod
    def seal(self, outcome: Outcome, scores: Scored, kept: Kept) -> Outcome:
        """The outcome, whole on disk where the request names a place; the kept answers are discarded."""


class RunMeasurement(Measurement[PartialRun, TableScores, Run]):
    """A measurement that gives a run. A kind implements `read`, `open`, `windows`, `score`; the rest has defaults."""

    def __init__(self, request: RunRequest, judge: Judge | None = None) -> None:
        self.request = request
        self.judge = judge
        self.began = time.monotonic()

    def check(self) -> None:
        """Refuse a request that no kind can honour. Raises UsageError, InputError for the cache folder."""
        check_request(self.request)
        partial_root()

    def identity(self, inputs: Inputs) -> dict[str, Any]:
        """Everything that changes a number of the table. Kept answers are resumed under the same identity only."""
        return identity_of(self.request, inputs)

    def noise_floors(self, scores: TableScores, watch: Observer) -> list[Itself]:
        """Each model compared with itself; empty where not requested or not measurable."""
        return []

    def speeds(self) -> dict[str, float]:
        """By spec, tokens a second of what was scored in this process; a model whose speed is not known is absent."""
        return {}

    def token_texts(self, scores: TableScores) -> dict[int, str] | None:
        """The text of every token id in the table and in the alternatives; None where it is not known."""
        return None

    def resume(self, inputs: Inputs) -> AbstractContextManager[PartialRun]:
        """See `Measurement`."""
        return partial_run(self.identity(inputs), resume=self.request.resume)

    def described(self) -> dict[str, Any]:
        """See `Measurement`."""
        return described(self.request)

    def is_new(self, kept: PartialRun) -> bool:
        """See `Measurement`."""
        return kept.empty

    def sum_up(self, inputs: Inputs, scores: TableScores, watch: Observer) -> Run:
        """See `Measurement`."""
        texts = self.token_texts(scores)  # before the noise floor, which restarts the server that knows them
        return summed_up(
            self.request,
            inputs,
            scores,
            self.identity(inputs),
            floors=self.noise_floors(scores, watch),
            token_texts=texts,
            began=self.began,
        )

    def seal(self, outcome: Run, scores: TableScores, kept: PartialRun) -> Run:
        """See `Measurement`."""
        if self.request.out is not None:
            outcome = write_run(
                self.request.out,
                manifest=outcome.manifest,
                table=outcome.table,
                summary=outcome.summary,
                token_texts=outcome.token_texts,
                alternatives_table=outcome.alternatives_table,
                overwrite=self.request.overwrite,
            )
        if scores.complete:
            kept.discard()
        return outcome
