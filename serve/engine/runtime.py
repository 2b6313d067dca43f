"""One resident model: its runner, head, pages and queue, and one step of it: schedule, forward, reduce, reply."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from serve.config import LEAST_TOKENS, EngineConfig
from serve.engine import reduce
from serve.engine.head import AnyHead
from serve.engine.interface import settle
from serve.engine.lanes import buffer as buffer_of
from serve.engine.pages import PagePool
from serve.engine.remembered import checked as remembered
from serve.engine.rows import Answer, StepRows, check_finite, needed
from serve.engine.runner import Segment
from serve.engine.scheduler import Chunk, Limits, Scheduler
from serve.engine.selfcheck import prepare
from serve.engine.sequence import Finished, Sequence
from serve.engine.streamed import StreamedModel
from serve.engine.tiled import TILE_ROWS
from serve.engine.transfer import upload
from serve.errors import BadRequest, LoadFailed, ScoringFailed
from serve.models.load import LoadedModel

_SCORED_CPU, _SCORED_DEVICE = 1 << 26, 1 << 30
_SCORES_PART = 16  # the scores kept with cached prefixes may take 1/16 of the KV memory, beside it


class HeadRuntime:
    """A model's output head over hidden rows, a tile at a time, and how long that takes.

    The rows come from the model's body (`ModelRuntime`), or from where they are kept (serve/engine/kept.py).
    backend: how the body runs. deviation, kl_floor: see `serve.engine.selfcheck.Checked`.
    """

    backend: str = ""
    deviation: float = 0.0
    kl_floor: float = 0.0
    streamed: StreamedModel | None = None

    def __init__(self, loaded: LoadedModel, head: AnyHead, config: EngineConfig) -> None:
        self.loaded = loaded
        self.name = loaded.name
        self.head = head
        self.config = config
        limit = config.max_model_len or loaded.context_length
        self.context_length = min(limit, loaded.context_length)
        self.device = loaded.device
        self.rows_per_tile = max(1, config.tile_bytes // (4 * head.vocab_size))
        if config.deterministic:
            self.rows_per_tile = min(self.rows_per_tile, TILE_ROWS)
        # a lane's products have other bits than those of all threads together
        self.in_lanes = self.device.type == "cpu" and head.parallel and not config.deterministic
        self._timing = threading.Lock()
        self.scored_tokens, self.scoring_seconds = 0, 0.0  # of windows that were scored, in `timed` blocks

    def runs(self) -> ModelRuntime:
        """The model with its body. Raises LoadFailed where that has to be loaded first and cannot be."""
        raise NotImplementedError

    @contextmanager
    def timed(self, tokens: int = 0, *, share: float = 1.0) -> Iterator[None]:
        """Count the block's time, and the tokens that it shows the model, towards this model's scoring.

        share: of the machine, where other blocks run beside it.
        """
        began = time.perf_counter()
        try:
            yield
            if self.device.type == "cuda":  # a kernel's launch says nothing about how long it takes
                torch.cuda.synchronize(self.device)
        finally:
            with self._timing:
                self.scoring_seconds += share * (time.perf_counter() - began)
                self.scored_tokens += tokens

    def full_tile(self, rows: list[int]) -> list[int]:
        """Indices of a tile's rows; where numbers must not depend on the batch, filled up with copies of the first."""
        return rows + rows[:1] * (self.rows_per_tile - len(rows)) if self.config.deterministic else rows

    def tiles(self, hidden: torch.Tensor) -> Iterator[tuple[int, list[int], torch.Tensor]]:
        """Hidden rows a tile at a time: first row, the full tile's rows, their float32 logits [rows, vocabulary].

        All of the full tile is to be reduced, so that sums do not depend on how many rows there are. The logits are in
        one reused buffer.
        """
        for low in range(0, hidden.shape[0], self.rows_per_tile):
            rows = self.full_tile(list(range(low, min(low + self.rows_per_tile, hidden.shape[0]))))
            yield low, rows, self.tile(_select(hidden, rows))

    def tile(self, hidden: torch.Tensor, *, buffer: str = "tile") -> torch.Tensor:
        """Float32 logits of at most rows_per_tile hidden rows.

        Valid until the calling thread's next tile in the same buffer, of whichever model.
        """
        out = buffer_of(buffer, self.rows_per_tile, self.head.vocab_size, hidden.device)
        return self.head.logits(hidden, out[: hidden.shape[0]])


class ModelRuntime(HeadRuntime):
    """A model ready to answer. Lives on the engine's thread."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, *, kv_memory: int) -> None:
        self.streamed = StreamedModel(loaded, config) if loaded.stream is not None else None
        if self.streamed is not None:
            checked = self.streamed.checked
            plan = self.streamed.plan
            config = replace(config, max_batch_tokens=plan.batch, tile_bytes=plan.tile_bytes)
        else:
            check = remembered if config.remember_checks else prepare
            checked = check(loaded, own_head=config.logits == "model", deterministic=config.deterministic)
        settle(loaded.model)
        super().__init__(loaded, checked.head, config)
        self.runner = checked.runner
        self.backend, self.deviation, self.kl_floor = checked.backend, checked.deviation, checked.kl_floor
        token_bytes = max(1, self.runner.token_bytes)
        self.pool = PagePool(_room(self.name, kv_memory, token_bytes) if self.runner.keeps_kv else 0)
        self.runner.allocate(self.pool.capacity)
        self.scheduler = Scheduler(
            self.pool,
            Limits(
                config.max_batch_tokens,
                config.max_sequences,
                keeps_kv=self.runner.keeps_kv,
                scored=max(1, _scored_logits(loaded) // self.head.vocab_size),
                score_bytes=kv_memory // _SCORES_PART,
                regime=self.runner.regime,
            ),
        )

    def runs(self) -> ModelRuntime:
        """The model itself: its body is loaded."""
        return self

    def step(self) -> None:
        """Run one step of this model's queue."""
        chunks = self.scheduler.schedule()
        if not chunks:
            self._refuse_stuck()
            return
        try:
            hidden = self._forward(chunks)
            answers = self._reduce(chunks, hidden)
            self._reply(chunks, answers)
        except Exception as error:
            for sequence in _distinct(chunks):
                self.end(sequence, error)

    def end(self, sequence: Sequence, outcome: Finished | Exception) -> None:
        """Finish a sequence and report the outcome to its owner, once."""
        if sequence.ended:
            return
        sequence.ended = True
        if isinstance(outcome, Exception):
            sequence.computed, sequence.uncached_scores = 0, []  # a failed step may have written anything
        self.scheduler.finish(sequence)
        sequence.on_end(outcome)

    def _forward(self, chunks: list[Chunk]) -> torch.Tensor | None:
        """Hidden rows of the chunks, side by side; None where nothing is left to run."""
        tokens: list[int] = []
        segments = []
        for sequence, start, length, stored in chunks:
            if length:
                end = start + length
                segments.append(
                    Segment(len(tokens), length, start, sequence.block_table[:end], stored, len(sequence.tokens))
                )
                tokens.extend(sequence.tokens[start:end])
        return self.runner.forward(tokens, segments) if tokens else None

    def _reduce(self, chunks: list[Chunk], hidden: torch.Tensor | None) -> list[Answer]:
        """The token and the scores of every row that some sequence needs, a tile of rows at a time."""
        rows = sorted(needed(chunks), key=lambda row: row.hidden_row)
        if hidden is None or not rows:
            return []
        distinct = list(dict.fromkeys(row.hidden_row for row in rows))  # nested prompts share rows with their host
        # Where sums over the vocabulary depend on how many rows there are, a full tile is reduced for the same bits.
        whole = self.config.deterministic and not reduce.by_row(hidden.device)
        hidden_rows = [row.hidden_row for row in rows]
        step = StepRows()
        with torch.inference_mode():
            for low in range(0, len(distinct), self.rows_per_tile):
                part = distinct[low : low + self.rows_per_tile]
                place = {hidden_row: i for i, hidden_row in enumerate(part)}
                some = rows[bisect_left(hidden_rows, part[0]) : bisect_right(hidden_rows, part[-1])]
                logits = self.tile(_select(hidden, self.full_tile(part)))
                step.add_tile(some, [place[row.hidden_row] for row in some], logits, whole=whole)
            return step.answers()

    def _reply(self, chunks: list[Chunk], answers: list[Answer]) -> None:
        """Hand out a step's answers, note what has run, and end what is complete."""
        for answer in answers:
            self._deliver(answer)
        for chunk in chunks:
            self._advance(chunk)
        for sequence in _distinct(chunks):
            for nested in list(sequence.nested):
                self._settle_nested(nested)
            self._settle(sequence)

    def _deliver(self, answer: Answer) -> None:
        """Add one row's scores to its sequence, and report a generated token to its owner."""
        (_, sequence, at), token, scores, failure = answer
        generates = answer.row.generates
        if sequence.ended:
            return
        if failure is not None:
            self.end(sequence, failure)
            return
        if scores is not None:
            try:
                check_finite(scores, at, self.name)
            except ScoringFailed as error:
                self.end(sequence, error)
                return
            sequence.add_scores(at, scores)
            sequence.uncached_scores.append(at)
        if generates:
            sequence.tokens.append(token)
            if sequence.on_token(token, scores):
                sequence.stopped = True

    def _advance(self, chunk: Chunk) -> None:
        """Note what a chunk has run."""
        sequence, start, length, stored = chunk
        if not sequence.running or not self.runner.keeps_kv:
            return
        if not stored:
            sequence.computed = start + length
        elif length:
            first, end = sequence.recompute[0]
            sequence.recompute[:1] = [(first + length, end)] if first + length < end else []

    def _settle(self, sequence: Sequence) -> None:
        """After a step: report prompt scores that are complete, share the prefix, end the sequence where it is done."""
        ask = sequence.ask
        if sequence.ended or (self.runner.keeps_kv and (sequence.recompute or sequence.computed < len(ask.prompt))):
            return
        self._report_prompt(sequence)
        if self.runner.keeps_kv and sequence.computed == len(ask.prompt):
            self.scheduler.keep_prefix(sequence)
        self._end_if_done(sequence)

    def _settle_nested(self, nested: Sequence) -> None:
        """The same for a sequence that is answered from its host's rows; one that goes on is detached."""
        if nested.unscored or (nested.ask.max_tokens and not nested.generated):
            return
        self._report_prompt(nested)
        self._end_if_done(nested)
        if not nested.ended:
            self.scheduler.detach(nested)

    def _report_prompt(self, sequence: Sequence) -> None:
        if sequence.ask.prompt_logprobs is not None and not sequence.prompt_reported:
            sequence.prompt_reported = True
            sequence.on_prompt(sequence.prompt_rows)

    def _end_if_done(self, sequence: Sequence) -> None:
        ask = sequence.ask
        if sequence.stopped or (sequence.generated and sequence.tokens[-1] in ask.stop_token_ids):
            self.end(sequence, Finished("stop", sequence.cached_tokens))
        elif sequence.generated >= ask.max_tokens or len(sequence.tokens) >= self.context_length:
            self.end(sequence, Finished("length", sequence.cached_tokens))

    def _refuse_stuck(self) -> None:
        """End what could not be scheduled although nothing else runs: its pages will never fit."""
        for sequence in (self.scheduler.running or list(self.scheduler.waiting))[:1]:
            message = f"the KV memory holds {self.pool.capacity} tokens, too few for this request: raise --kv-memory"
            self.end(sequence, BadRequest(message))


def _room(name: str, kv_memory: int, token_bytes: int) -> int:
    """Tokens whose keys and values fit. Raises LoadFailed where they are too few to serve anything."""
    tokens = kv_memory // token_bytes
    if tokens < LEAST_TOKENS:
        raise LoadFailed(
            f"--kv-memory leaves '{name}' room for the keys and values of {tokens} tokens and {LEAST_TOKENS} are the "
            f"least: give {LEAST_TOKENS * token_bytes:,} bytes or more for each model"
        )
    return tokens


def _scored_logits(loaded: LoadedModel) -> int:
    """Logits of prompt rows that one step may take while a stream waits for its next token: some tenths of a second."""
    return _SCORED_CPU if loaded.device.type == "cpu" else _SCORED_DEVICE


def _distinct(chunks: list[Chunk]) -> list[Sequence]:
    return list({chunk.sequence.number: chunk.sequence for chunk in chunks}.values())


def _select(hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Some rows of hidden states, in the order given."""
    return hidden.index_select(0, *upload(hidden.device, np.array(rows, dtype=np.int64)))
