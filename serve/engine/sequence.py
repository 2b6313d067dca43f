"""One request on its way through the engine: its tokens, how far they are computed, what is to be reported."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
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

    Invariants: pages[i] holds the keys and values of tokens[i] for i < computed; len(pages) <= len(tokens);
    tokens[: len(ask.prompt)] is the prompt.
    """

    ask: Ask
    on_prompt: Callable[[list[RowScores]], None]  # scores of prompt tokens 1.., once
    on_token: Callable[[int, RowScores | None], bool | None]  # each generated token; True = end here
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
    stopped: bool = False  # its owner asked to end it at the last token

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
