"""The contract of a dialect: how an endpoint is asked for log-probabilities, without any I/O.

A dialect is a generator: it yields a tuple of requests, is sent the tuple of their replies in the same
order, and returns the scores of one window (the pattern of httpx's auth flow). The requests of one tuple
are independent of each other; whoever drives the generator may run them at once, and retries them.
Paths start at the server's root: "/v1/completions", "/generate".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from evalgate.core import Message, Window
from evalgate.errors import EndpointError, EvalgateError, UsageError

if TYPE_CHECKING:
    from evalgate.dialects.findings import Findings
    from evalgate.dialects.generation import Generation
    from evalgate.dialects.listings import Listing

T = TypeVar("T")


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
    ordered by ascending id, which makes its ranks exact. excess: nats by which all of a position's logprobs may be
    too high, since the server's probabilities add up to more than 1.
    """

    max_logprobs: int | None = None
    token_id_keys: bool = True
    return_token_ids: bool = True
    forced: Literal["", "allowed_token_ids", "logit_bias"] = ""
    logprob_token_ids: bool = False
    max_tokens_zero: bool = False
    temperature: float = 0.0
    tie_order: Literal["id", "unknown"] = "unknown"
    excess: float = 0.0


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

    def error(self, kind: type[EvalgateError], message: str, **context: object) -> EvalgateError:
        """An error of `kind` that names window, position and path; a window below 0 is the probe's and has no name."""
        inside = self.window is None or self.window >= 0
        named = (("window", self.window), ("position", self.position)) if inside else ()
        where = ", ".join([*(f"{name} {n}" for name, n in named if n is not None), self.path])
        return kind(f"{where}: {message}", window=self.window, position=self.position, endpoint=self.path, **context)


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


Asking = Generator[tuple[Request, ...], tuple[Reply, ...], T]
Exchange = Asking[WindowScores]


class Dialect(ABC):
    """One way to ask for log-probabilities. One file of this folder each; the file's name is the dialect's name.

    Everything that the rest of evalgate must know about a dialect stands here, so that a new one is one file:

    alternative     one of the k likeliest tokens that a reply lists at a position
    prompt scoring  one request answers a whole window; otherwise each position is a request of its own
    naming ids      asking for the log-probabilities of given ids, likely or not
    drawing         sampling tokens from the endpoint's whole distribution at temperature 1
    listing         the alternatives of one position as they came, before they are judged
    honoured        the endpoint does what it is asked, and does not merely accept the request

    A subclass states `summary`, `order` and `prompt_scoring` and implements `score_window`; the rest has defaults.
    """

    summary: ClassVar[str]
    """One line for people: what is asked, and of which server."""
    order: ClassVar[int]
    """The probe uses the honoured dialect of the lowest order. Built-in dialects go from 10 to 80: those that score
    a whole window before those that do not, those that answer with ids before those that answer with texts."""
    prompt_scoring: ClassVar[bool]
    """Whether one request scores a whole window; else there is one per position."""
    most_alternatives: ClassVar[int | None] = None
    """Most alternatives per position that the protocol itself allows, None = as many as the server serves."""
    lists_all: ClassVar[bool] = False
    """Whether one reply may list the whole vocabulary, so that the probe can add its probabilities up."""
    text_keyed: ClassVar[bool] = False
    """Whether alternatives come as texts, which only a local tokenizer can turn back into ids."""
    shared_ids: ClassVar[bool] = False
    """Whether ids are named once for the whole window, so that a reply holds positions x ids values."""
    chat: ClassVar[Literal["ids", "messages"]] = "ids"
    """How a chat goes out: as token ids under the local template, or as messages under the server's own."""
    generation: ClassVar[Generation | None] = None
    """How the server generates tokens, for the probe's measurements and for `draw`; None = not through this dialect."""
    draws: ClassVar[bool] = True
    """Whether tokens can be drawn through `generation`."""

    @property
    def name(self) -> str:
        """Name on the command line: that of its file."""
        return type(self).__module__.rpartition(".")[2]

    @abstractmethod
    def score_window(self, window: Window, ask: Ask) -> Exchange:
        """Ask about one window. Raises ScoreError and EndpointError, each naming window, position and path."""

    def recognised(self, found: Findings) -> Asking[bool]:
        """Whether the endpoint honours this dialect. By default: whether the probe's prompt can be scored with it."""
        honoured = (yield from found.scored(self, k=1)) is not None
        found.facts["ids_on_wire"] |= honoured and not self.text_keyed
        return honoured

    def preferable(self, found: Findings) -> bool:
        """Whether the probe may choose it, where it is honoured; else it is only used when it is asked for."""
        return True

    def listing(self, found: Findings, k: int) -> Asking[Listing]:
        """The alternatives of the last position of the probe's prompt, k asked for; empty where that is refused."""
        scores = yield from found.scored(self, k=k)
        rows = scores.rows if scores is not None else ()
        return (
            [(f"token_id:{t}", v) for t, v in zip(rows[-1].top_ids, rows[-1].top_logprobs, strict=True)] if rows else []
        )

    def names_ids(self, able: Capabilities) -> bool:
        """Whether an endpoint that can do what `able` says gives the log-probabilities of ids that are named."""
        return False

    def again(self, window: Window, ask: Ask) -> int:
        """Most requests that are sent a second time about what the first replies left open."""
        return 0

    def most_requests(self, window: Window, ask: Ask) -> int:
        """Most requests that a window takes, repeats of failed ones aside."""
        first = 1 if self.prompt_scoring else -(-len(ask.positions_in(window)) // ask.listed)
        return first + self.again(window, ask)

    def draw(
        self, model: str, able: Capabilities, prompt: tuple[int, ...], count: int, *, seed: int
    ) -> Asking[tuple[int, ...] | None]:
        """Up to `count` new ids after the prompt, fewer where the text ended; None where no ids come back.

        Raises EndpointError for a refusal. That the server samples without truncation is asked for, not proved.
        """
        if not self.draws or self.generation is None:
            return None
        return (yield from self.generation.draw(model, able, prompt, count, seed=seed))
