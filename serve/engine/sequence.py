"""One request on its way through the engine: its tokens, how far they are computed, what is to be reported."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

_numbers = itertools.count()


@dataclass(frozen=True)
class Ask:
    """What a request wants.

    logprobs / prompt_logprobs: None = nothing; 0 = the actual token only; k = it and the k likeliest;
    -1 = the whole vocabulary. temperature 0 = greedy.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    temperature: float = 0.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    allowed_token_ids: tuple[int, ...] = ()


class RowScores(NamedTuple):
    """One scored position: the token there, its logprob (nats) and rank, and the top-k in the one order."""

    token: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class Finished(NamedTuple):
    """The end of a request. reason: 'stop' (a stop token), 'length' (max_tokens or the context's end)."""

    reason: str
    cached_tokens: int


@dataclass(eq=False)
class Sequence:
    """A request in the engine.

    Invariants: pages[i] holds the keys and values of tokens[i] for i < computed; len(pages) <= len(tokens);
    tokens[: len(ask.prompt)] is the prompt.
    """

    ask: Ask
    on_prompt: Callable[[list[RowScores]], None]  # scores of prompt tokens 1.., once
    on_token: Callable[[int, RowScores | None], None]  # each generated token
    on_end: Callable[[Finished | Exception], None]  # exactly once
    number: int = field(default_factory=lambda: next(_numbers))
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    node: object | None = None  # the radix node it has locked
    cached: int = 0
    prompt_rows: list[RowScores] = field(default_factory=list)
    prompt_told: bool = False
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.ask.prompt)

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.ask.prompt)

    @property
    def pending(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return len(self.tokens) - self.computed

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt positions are still to be scored, so that cached ones must be computed again."""
        return self.ask.prompt_logprobs is not None and len(self.prompt_rows) < len(self.ask.prompt) - 1
