"""One resident model: its backend, head, pages and queue, and one step of it (schedule, forward, reduce, reply)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from serve.config import EngineConfig
from serve.engine import reduce
from serve.engine.attention import Segment
from serve.engine.pages import PagePool
from serve.engine.sampling import choose
from serve.engine.scheduler import Chunk, Limits, Scheduler
from serve.engine.selfcheck import prepare
from serve.engine.sequence import Finished, RowScores, Sequence
from serve.engine.wanted import score_wanted
from serve.errors import BadRequest, ScoringFailed
from serve.models.load import LoadedModel


class _Row(NamedTuple):
    """A row of hidden states that needs logits: it predicts tokens[at] of its sequence."""

    hidden_row: int
    sequence: Sequence
    at: int

    @property
    def generates(self) -> bool:
        return self.at == len(self.sequence.tokens)

    @property
    def k(self) -> int | None:
        ask = self.sequence.ask
        return ask.logprobs if self.at >= len(ask.prompt) else ask.prompt_logprobs


class ModelRuntime:
    """A model ready to answer. Lives on the engine's thread."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, *, kv_memory: int) -> None:
        self.loaded = loaded
        self.name = loaded.name
        checked = prepare(loaded, own_head=config.logits == "model")
        self.runner, self.head = checked.runner, checked.head
        self.backend, self.deviation, self.kl_floor = checked.backend, checked.deviation, checked.kl_floor
        self.config = config
        limit = config.max_model_len or loaded.context_length
        self.context_length = min(limit, loaded.context_length)
        token_bytes = max(1, self.runner.token_bytes)
        self.pool = PagePool(max(16, kv_memory // token_bytes) if self.runner.keeps_kv else 0)
        self.runner.allocate(self.pool.capacity)
        self.scheduler = Scheduler(
            self.pool, Limits(config.max_batch_tokens, config.max_sequences, keeps_kv=self.runner.keeps_kv)
        )
        self.rows_per_tile = max(1, config.tile_bytes // (4 * self.head.vocab_size))
        self._buffers: dict[str, torch.Tensor] = {}

    def step(self) -> None:
        """Run one step of this model's queue."""
        chunks = self.scheduler.schedule()
        if not chunks:
            self._refuse_stuck()
            return
        try:
            hidden = self._forward(chunks)
            self._reduce_and_reply(chunks, hidden)
        except Exception as error:
            for chunk in chunks:
                self.end(chunk.sequence, error)

    def end(self, sequence: Sequence, outcome: Finished | Exception) -> None:
        """Finish a sequence and tell its owner."""
        if isinstance(outcome, Exception):
            sequence.computed = 0  # what a failed step left in its pages is not trusted
        self.scheduler.finish(sequence)
        sequence.on_end(outcome)

    def tiles(self, hidden: torch.Tensor, *, buffer: str = "tile") -> Iterator[tuple[slice, torch.Tensor]]:
        """Float32 logits [rows of the tile, vocabulary] of hidden rows, a tile at a time, in one reused buffer."""
        for low in range(0, hidden.shape[0], self.rows_per_tile):
            rows = slice(low, min(low + self.rows_per_tile, hidden.shape[0]))
            yield rows, self.tile(hidden[rows], buffer=buffer)

    def tile(self, hidden: torch.Tensor, *, buffer: str = "tile") -> torch.Tensor:
        """Float32 logits of at most rows_per_tile hidden rows; valid until the next call with the same buffer."""
        shape = (self.rows_per_tile, self.head.vocab_size)
        if buffer not in self._buffers:
            self._buffers[buffer] = torch.empty(shape, dtype=torch.float32, device=hidden.device)
        return self.head.logits(hidden, self._buffers[buffer][: hidden.shape[0]])

    def _forward(self, chunks: list[Chunk]) -> torch.Tensor:
        tokens: list[int] = []
        segments = []
        for sequence, start, length in chunks:
            end = start + length
            segments.append(Segment(len(tokens), length, start, sequence.pages[:end]))
            tokens.extend(sequence.tokens[start:end])
        return self.runner.forward(tokens, segments)

    def _reduce_and_reply(self, chunks: list[Chunk], hidden: torch.Tensor) -> None:
        rows = list(_rows(chunks))
        with torch.inference_mode():
            picked = hidden[[row.hidden_row for row in rows]]
            for part, logits in self.tiles(picked):
                self._reply_rows(rows[part], logits)
        for chunk in chunks:
            self._advance(chunk)

    def _reply_rows(self, rows: list[_Row], logits: torch.Tensor) -> None:
        """Sample and score one tile: one reduction at the largest k for the rows that ask, none for the others."""
        chosen = [
            choose(row.sequence, logits[i]) if row.generates else row.sequence.tokens[row.at]
            for i, row in enumerate(rows)
        ]
        asking = [i for i, row in enumerate(rows) if row.k is not None]
        scores: dict[int, RowScores] = {}
        if asking:
            subset = logits if len(asking) == len(rows) else logits[asking]
            wanted = [_width(rows[i].k, self.head.vocab_size) for i in asking]
            named = [rows[i].sequence.ask.wanted_ids(rows[i].at) for i in asking]
            scored = score_rows(subset, [chosen[i] for i in asking], wanted, named)
            for i, row_scores in zip(asking, scored, strict=True):
                _check_finite(row_scores, rows[i], self.name)
                scores[i] = row_scores
        for i, row in enumerate(rows):
            if row.generates:
                row.sequence.tokens.append(chosen[i])
                if row.sequence.on_token(chosen[i], scores.get(i)):
                    row.sequence.stopped = True
            else:
                row.sequence.prompt_rows.append(scores[i])

    def _advance(self, chunk: Chunk) -> None:
        """Book the step: what is computed, prompt scores that are complete, sequences that are done."""
        sequence, ask = chunk.sequence, chunk.sequence.ask
        if self.runner.keeps_kv:
            sequence.computed = chunk.start + chunk.length
        prompt_done = chunk.start + chunk.length >= len(ask.prompt)
        if not prompt_done:
            return
        if ask.prompt_logprobs is not None and not sequence.prompt_told:
            sequence.prompt_told = True
            sequence.on_prompt(sequence.prompt_rows)
        if self.runner.keeps_kv and sequence.computed == len(ask.prompt):
            self.scheduler.keep_prefix(sequence)
        last = sequence.tokens[-1]
        if sequence.stopped or (ask.max_tokens and sequence.generated and last in ask.stop_token_ids):
            self.end(sequence, Finished("stop", sequence.cached))
        elif sequence.generated >= ask.max_tokens or len(sequence.tokens) >= self.context_length:
            self.end(sequence, Finished("length", sequence.cached))

    def _refuse_stuck(self) -> None:
        """Nothing could be scheduled although something is there: its pages will never fit."""
        for sequence in (self.scheduler.running or list(self.scheduler.waiting))[:1]:
            message = f"the KV memory holds {self.pool.capacity} tokens, too few for this request: raise --kv-memory"
            self.end(sequence, BadRequest(message))


def _rows(chunks: list[Chunk]) -> Iterator[_Row]:
    """The rows of a step that need logits: prompt positions to be scored, and the last token of a complete prefix."""
    at = 0
    for sequence, start, length in chunks:
        ask = sequence.ask
        if sequence.scores_prompt:
            # hidden row j predicts token j + 1; rows before the last scored one were done in earlier chunks
            first = max(start, len(sequence.prompt_rows))
            for j in range(first, min(start + length, len(ask.prompt) - 1)):
                yield _Row(at + j - start, sequence, j + 1)
        if start + length == len(sequence.tokens) and sequence.generated < ask.max_tokens:
            yield _Row(at + length - 1, sequence, len(sequence.tokens))
        at += length


def _width(k: int | None, vocabulary: int) -> int:
    return vocabulary if k == -1 else int(k or 0)


def score_rows(
    logits: torch.Tensor, tokens: list[int], ks: list[int], named: list[tuple[int, ...]] | None = None
) -> list[RowScores]:
    """Score rows of logits [rows, vocabulary] at the largest k, cut per row to its own k; `named` ids exactly."""
    chosen = torch.as_tensor(tokens, device=logits.device)
    of = reduce.marginal(logits, max(ks))
    logprob = reduce.chosen_logprobs(logits, chosen, of.lse).tolist()
    rank = reduce.ranks(logits, chosen, of.top).tolist()
    width = max(ks)
    ids = of.top.ids[:, :width].tolist()
    values = (of.top.values[:, :width].double() - of.lse[:, None]).tolist()
    by_name = [score_wanted(logits[i], asked, float(of.lse[i])) for i, asked in enumerate(named or ())]
    return [
        RowScores(
            tokens[i], logprob[i], rank[i], tuple(ids[i][:k]), tuple(values[i][:k]), by_name[i] if by_name else ()
        )
        for i, k in enumerate(ks)
    ]


def _check_finite(scores: RowScores, row: _Row, model: str) -> None:
    # -inf is a number here: a model may rule a token out
    if any(math.isnan(x) or x == math.inf for x in (scores.logprob, *scores.top_logprobs)):
        raise ScoringFailed(f"{model} gives a non-finite logprob for token {scores.token} at position {row.at}")
