"""The contract of a dialect: how an endpoint is asked for log-probabilities, without any I/O.

A dialect is a generator: it yields a tuple of requests, is sent the tuple of their replies in the same
order, and returns the scores of one window (the pattern of httpx's auth flow). The requests of one tuple
are independent of each other; whoever drives the generator may run them at once, and retries them.
Paths start at the server's root: "/v1/completions", "/generate".
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from evalgate.core import Message, Window
from evalgate.errors import EndpointError, EvalgateError, UsageError


@dataclass(frozen=True)
class Request:
    """One HTTP request. `json` is None for a GET."""

    method: Literal["GET", "POST"]
    path: str
    json: dict[str, Any] | None = None


@dataclass(frozen=True)
class Reply:
    """One HTTP reply, as it came: header names in lower case.

    began, ended: seconds on one monotonic clock, of the exchange that was answered; 0 = not measured.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    began: float = 0.0
    ended: float = 0.0


class Vocabulary(Protocol):
    """The local tokenizer's tokens as bytes. Several ids may stand for the same bytes."""

    def bytes_of(self, token: int) -> bytes:
        """Bytes that `token` adds to a text."""

    def ids_of(self, data: bytes) -> frozenset[int]:
        """Every id whose bytes are `data`; empty where there is none."""


@dataclass(frozen=True)
class Capabilities:
    """What an endpoint was found to do (see `evalgate.probe.probe`).

    max_logprobs: largest k it serves, None = unknown. token_id_keys: honours
    `return_tokens_as_token_ids`. return_token_ids: honours `return_token_ids`. forced: the field that
    forces the generated token while its logprob stays raw, "" = none. logprob_token_ids: honours
    `logprob_token_ids`. max_tokens_zero: `echo` works without generating. temperature: the one at which
    generated logprobs are those of the raw logits (0 = greedy). tie_order: "id" where equal logits are
    ordered by ascending id, which makes its ranks exact.
    """

    max_logprobs: int | None = None
    token_id_keys: bool = True
    return_token_ids: bool = True
    forced: Literal["", "allowed_token_ids", "logit_bias"] = ""
    logprob_token_ids: bool = False
    max_tokens_zero: bool = False
    temperature: float = 0.0
    tie_order: Literal["id", "unknown"] = "unknown"


@dataclass(frozen=True)
class ChatPrefix:
    """The chat that a window was made from: turns before the scored one, whose first token is ids[start]."""

    messages: tuple[Message, ...]
    start: int


@dataclass(frozen=True)
class Ask:
    """What is wanted of an endpoint.

    k: alternatives per position, 0 = the actual token only. positions: a subset of the window's, None =
    all. wanted: position -> ids that should be scored besides. batch: requests per yielded tuple.
    listed: prefixes of one request, where the endpoint takes lists of prompts. descending: longest prefix
    first. vocab_size: rows of the model's head, where known.
    """

    model: str
    k: int
    capabilities: Capabilities = field(default_factory=Capabilities)
    positions: tuple[int, ...] | None = None
    wanted: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    vocabulary: Vocabulary | None = None
    vocab_size: int | None = None
    chat: ChatPrefix | None = None
    batch: int = 32
    listed: int = 1
    descending: bool = False

    def positions_in(self, window: Window) -> tuple[int, ...]:
        """The asked positions, ascending.

        Raises UsageError where one is not a scored position of the window or none is left, and
        EndpointError where k is over what the endpoint serves.
        """
        if self.k < 0 or self.batch < 1 or self.listed < 1:
            raise UsageError(
                f"k is {self.k}, batch {self.batch} and listed {self.listed}: ask for k >= 0 alternatives, "
                "1 request or more of 1 prefix or more"
            )
        limit = self.capabilities.max_logprobs
        if limit is not None and self.k > limit:
            raise EndpointError(
                f"the endpoint serves at most {limit} alternatives and {self.k} were asked for: "
                f"lower k, or start vLLM with --max-logprobs {self.k}",
                window=window.index,
            )
        positions = window.positions if self.positions is None else tuple(sorted(set(self.positions)))
        stray = sorted(set(positions) - set(window.positions))
        if stray or not positions:
            what = f"position {stray[0]} is not scored" if stray else "no position is asked for"
            raise UsageError(f"window {window.index}: {what}: choose among its scored positions", window=window.index)
        return positions


@dataclass(frozen=True)
class Place:
    """Where a reply belongs, for error messages."""

    path: str
    window: int | None = None  # None = asked outside a window, by the probe
    position: int | None = None

    def at(self, position: int) -> Place:
        """The same place at one position."""
        return Place(self.path, self.window, position)

    def error(self, kind: type[EvalgateError], message: str) -> EvalgateError:
        """An error of `kind` that names window, position and path."""
        spots = [f"{name} {n}" for name, n in (("window", self.window), ("position", self.position)) if n is not None]
        where = ", ".join([*spots, self.path])
        return kind(f"{where}: {message}", window=self.window, position=self.position, endpoint=self.path)


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probability (nats) of one id: low = high where it is known, else the interval [low, high]."""

    token: int
    low: float
    high: float
    why: str = ""  # why it is censored, "" = known

    @property
    def known(self) -> bool:
        """Whether it is a number and not an interval."""
        return not self.why


@dataclass(frozen=True, slots=True)
class PositionScore:
    """The scores of one position.

    chosen: the actual token t[i]. rank: its rank, None where only rank_low <= rank <= rank_high is known
    (rank_high None = no bound). top_ids, top_logprobs: of the k most likely tokens those whose id is
    known, logprob descending, then id ascending. unmatched: logprobs of the others (their text belongs to
    several ids or to none). merged: texts that stand for several tokens hid some of the k. wanted: the ids
    asked for besides, in their order. tail: probability of everything that is not listed. sentinels:
    values read as "not a number", as they came.
    """

    position: int
    chosen: Score
    rank: int | None
    rank_low: int
    rank_high: int | None
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    unmatched: tuple[float, ...]
    merged: bool
    wanted: tuple[Score, ...]
    tail: float
    sentinels: tuple[float, ...]

    @property
    def top1(self) -> int | None:
        """The most likely id, None where the reply does not say which it is."""
        if not self.top_ids or self.merged or self.sentinels:
            return None
        return None if self.unmatched and max(self.unmatched) >= self.top_logprobs[0] else self.top_ids[0]


@dataclass(frozen=True)
class WindowScores:
    """The scores of one window: one row per asked position, ascending.

    text_keyed: alternatives came as texts, matched back to ids through the vocabulary.
    """

    window: int
    document: str
    k: int
    rows: tuple[PositionScore, ...]
    text_keyed: bool

    @property
    def censored(self) -> int:
        """Positions whose actual token has no number."""
        return sum(not row.chosen.known for row in self.rows)

    @property
    def sentinels(self) -> frozenset[float]:
        """Every sentinel value that the endpoint sent."""
        return frozenset(value for row in self.rows for value in row.sentinels)


Exchange = Generator[tuple[Request, ...], tuple[Reply, ...], WindowScores]


@dataclass(frozen=True)
class Dialect:
    """One way to ask. Its name on the command line is its file's name.

    prompt_scoring: one request per window, else one per position. score_window(window, ask) raises
    ScoreError and EndpointError, each naming window, position and path. again(window, ask): most requests
    that it asks a second time about what the first replies left open.
    """

    summary: str
    prompt_scoring: bool
    score_window: Callable[[Window, Ask], Exchange]
    again: Callable[[Window, Ask], int] = lambda window, ask: 0

    def most_requests(self, window: Window, ask: Ask) -> int:
        """Requests that a window takes where every one is answered at once: at most, as for the second round."""
        first = 1 if self.prompt_scoring else -(-len(ask.positions_in(window)) // ask.listed)
        return first + self.again(window, ask)
