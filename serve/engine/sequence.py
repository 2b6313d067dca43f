"""One request on its way through the engine: its tokens, how far they are computed, what is to be reported."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_numbers = itertools.count()


@dataclass(frozen=True)
class Ask:
    """What a request wants.

    logprobs / prompt_logprobs: None = nothing; 0 = the actual token only; k = it and the k likeliest;
    -1 = the whole vocabulary. temperature 0 = greedy. The sampling fields choose tokens and never change a
    reported number; top_k 0 = no cut. logit_bias: (id, nats) pairs. min_tokens: stop tokens are not chosen
    before so many. wanted: ids whose exact logprobs every scored position reports; wanted_at, where given,
    says them per position (index into prompt + generated) instead. Scores with wanted ids are never cached.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    temperature: float = 0.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    allowed_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    wanted: tuple[int, ...] = ()
    wanted_at: Mapping[int, tuple[int, ...]] | None = None

    @property
    def wants(self) -> bool:
        """Whether given ids are to be scored."""
        return bool(self.wanted) or self.wanted_at is not None

    def wanted_ids(self, position: int) -> tuple[int, ...]:
        """The ids to score for the token at `position` of prompt + generated."""
        return self.wanted if self.wanted_at is None else self.wanted_at.get(position, ())


class Wanted(NamedTuple):
    """The score of an id that was asked for by name."""

    token: int
    logprob: float
    rank: int


class RowScores(NamedTuple):
    """One scored position: the token there, its logprob (nats) and rank, and the top-k in the one order.

    wanted: the ids that were asked for by name, in the asker's order.
    """

    token: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    wanted: tuple[Wanted, ...] = ()


class Finished(NamedTuple):
    """The end of a request. reason: 'stop' (a stop token), 'length' (max_tokens or the context's end)."""

    reason: str
    cached_tokens: int


@dataclass(eq=False)
class Sequence:
    """A request in the engine.

    Invariants: page block_table[i] holds the keys and values of tokens[i] for i < computed; len(block_table) <=
    len(tokens); tokens[: len(ask.prompt)] is the prompt. `recompute`: ascending, disjoint half-open ranges below
    `computed` that run once more, for their hidden rows alone (their keys and values are there already).

    `nested` are sequences whose tokens are a prefix of this one's, their host's: they are answered from its rows and
    have no pages of their own.
    """

    ask: Ask
    on_prompt: Callable[[list[RowScores]], None]  # scores of prompt tokens 1.., once
    on_token: Callable[[int, RowScores | None], bool | None]  # each generated token; True = end here
    on_end: Callable[[Finished | Exception], None]  # exactly once
    number: int = field(default_factory=lambda: next(_numbers))
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    recompute: list[tuple[int, int]] = field(default_factory=list)
    block_table: array[int] = field(default_factory=lambda: array("q"))
    node: object | None = None  # the radix node it has locked
    regime: int = 0  # that its keys and values are computed in, see lengths.py
    prefix_hit: int = 0  # tokens whose pages came from the cache when it started
    cached_tokens: int = 0  # prompt tokens that did not have to run at all, as the usage reports them
    nested: list[Sequence] = field(default_factory=list)
    host: Sequence | None = None  # the sequence that this one is nested in
    rows: dict[int, RowScores] = field(default_factory=dict)  # by position of prompt + generated
    unscored: int = 0  # prompt positions that are still to be scored
    uncached_scores: list[int] = field(default_factory=list)  # positions of `rows` that the cache has not been given
    prompt_reported: bool = False
    running: bool = False
    ended: bool = False
    cancelled: bool = False
    stopped: bool = False  # its owner asked to end it at the last token

    def __post_init__(self) -> None:
        self.tokens = list(self.ask.prompt)
        if self.ask.prompt_logprobs is not None:
            self.unscored = len(self.ask.prompt) - 1

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.ask.prompt)

    @property
    def pending(self) -> int:
        """Tokens that are still to run."""
        return len(self.tokens) - self.computed + sum(end - start for start, end in self.recompute)

    @property
    def generates(self) -> bool:
        """Whether the row of the last token is to give the next one."""
        return self.generated < self.ask.max_tokens

    @property
    def prompt_rows(self) -> list[RowScores]:
        """Scores of prompt tokens 1.., when none is missing."""
        return [self.rows[position] for position in range(1, len(self.ask.prompt))]

    def k_at(self, position: int) -> int | None:
        """How much is asked about the token at `position`."""
        return self.ask.logprobs if position >= len(self.ask.prompt) else self.ask.prompt_logprobs

    def rows_needed(self, start: int, end: int) -> Iterator[int]:
        """Which hidden rows of tokens [start, end) it needs: row j predicts the token at position j + 1."""
        if self.unscored:
            for j in range(start, min(end, len(self.ask.prompt) - 1)):
                if j + 1 not in self.rows:
                    yield j
        last = len(self.tokens) - 1
        if self.generates and start <= last < end:
            yield last

    def add_scores(self, position: int, row: RowScores) -> None:
        """Add the scores of a position that had none."""
        self.rows[position] = row
        if position < len(self.ask.prompt):
            self.unscored -= 1
