"""The words of the project as types: document, window, token scores, interval, figure, limits, verdict.

Logarithms are natural and divergences are in nats unless a name says otherwise.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from evalgate.errors import ScoreError

# Of the distribution evalgate-lm. serve/__init__.py says the same and is not imported for it: a file serve.py in the
# working directory of a notebook would stand in its place.
VERSION = "0.2.0"

Exactness = Literal["exact", "estimated", "bounded"]
Verdict = Literal["pass", "fail", "undecided"]
NOT_APPLICABLE: Literal["not applicable"] = "not applicable"  # of a rule that rests on what is not there yet
CANNOT_MEASURE: Literal["cannot measure"] = "cannot measure"  # of a gate that ended in an error
NO_METHOD = "none"
LEAST_LOGPROB = -1000.0
"""Nats. e**-1000 is 0 in float64, so a lower number is no log-probability: it is -inf, or a mask written as a number
(-1e4, -1e30, the least float16 or float32). It must never enter a figure. `serve.wire` has the same limit."""


@dataclass(frozen=True)
class Message:
    """One turn of a chat document.

    content: its text, "" where it has none. fields: what it holds besides role and text (tool calls, content parts, a
    name), as canonical JSON of one object, "" = nothing. A field of the same name stands for `content` on the wire.
    """

    role: str
    content: str
    fields: str = ""

    def wire(self) -> dict[str, Any]:
        """The message as OpenAI's chat format has it."""
        return {"role": self.role, "content": self.content, **(json.loads(self.fields) if self.fields else {})}


@dataclass(frozen=True)
class Document:
    """One unit of sampling: a text, or a chat (`messages`), with a unique name and a domain.

    tools: the tools that a chat offers, as canonical JSON of a list, "" = none. A chat that has a `text` too is shown
    as that where no template can show it: there is none, or it refuses the messages. whole: the name of the text that
    it is a part of, "" = none; the parts of a text follow one another, and joined they are the text.
    """

    name: str
    domain: str
    text: str = ""
    messages: tuple[Message, ...] = ()
    tools: str = ""
    whole: str = ""


@dataclass(frozen=True)
class TokenizedDocument:
    """A document as token ids.

    bytes_per_token[i] = UTF-8 bytes of the text that token i adds; they sum to the document's bytes.
    scored[i] says whether token i may be scored (chat: assistant tokens only); empty means all.
    refusal: why the document cannot be shown (a chat template that does not take it), "" = it can; it then has no ids.
    plain: why a chat is shown as its plain text, all of it scored; "" = it is not.
    `prefix` are the ids the tokenizer's own configuration puts first: BOS, for a few models several ids, none where
    it adds none or where the ids already start with them (chat templates).
    """

    name: str
    domain: str
    ids: tuple[int, ...]
    bytes_per_token: tuple[int, ...]
    prefix: tuple[int, ...] = ()
    scored: tuple[bool, ...] = ()
    refusal: str = ""
    plain: str = ""


@dataclass(frozen=True)
class Window:
    """Token ids t[0..n) shown to a source in one go.

    Positions i with score_from <= i < score_to are scored: the prediction of t[i] from t[0..i).
    1 <= score_from < score_to <= n. `mask`, where not empty, has one flag per position of
    [score_from, score_to) and leaves out positions inside the range (chat: other roles' tokens).
    bytes_per_token has length n.
    """

    index: int
    document: str
    domain: str
    ids: tuple[int, ...]
    score_from: int
    score_to: int
    bytes_per_token: tuple[int, ...]
    mask: tuple[bool, ...] = ()

    @property
    def positions(self) -> tuple[int, ...]:
        """The scored positions, ascending."""
        span = range(self.score_from, self.score_to)
        if not self.mask:
            return tuple(span)
        return tuple(i for i, keep in zip(span, self.mask, strict=True) if keep)


@dataclass(frozen=True)
class WindowPolicy:
    """How documents become windows. Part of every result's identity: another policy, another number.

    context: tokens in a full window, BOS included. stride: tokens by which windows advance.
    """

    preset: Literal["disjoint", "sliding", "llama.cpp", "lm-eval"]
    context: int
    stride: int


@dataclass(frozen=True)
class Skipped:
    """A document or file that gave no scored position, and why (one short phrase)."""

    name: str
    reason: str


@dataclass(frozen=True)
class Interval:
    """Where a figure may lie: from `low` to `high`, at a confidence, found by a method.

    None = that end is open: nothing bounds it, or the sample cannot support it. Where the method is NO_METHOD there is
    no interval at all (fewer than 2 documents). `label` names a narrower claim than "documents like these", as in
    "within this text"; it is empty where there is none.
    """

    low: float | None
    high: float | None
    confidence: float = 0.95
    method: str = NO_METHOD
    label: str = ""

    @property
    def known(self) -> bool:
        """Whether there is an interval, be its ends open or not."""
        return self.method != NO_METHOD or self.low is not None or self.high is not None

    @property
    def closed(self) -> bool:
        """Whether both ends are known."""
        return self.low is not None and self.high is not None

    def moved(self, by: float) -> Interval:
        """The interval with `by` added to the ends that are known."""
        return self.between(
            None if self.low is None else self.low + by,
            None if self.high is None else self.high + by,
        )

    def between(self, low: float | None, high: float | None) -> Interval:
        """An interval with these ends, at the same confidence, by the same method."""
        return replace(self, low=low, high=high)


@dataclass(frozen=True)
class Figure:
    """An estimate with its interval, ready to print.

    value: None where only bounds are known. se: standard error, None where unknown. n: values it rests on;
    documents: where they come from; both are 0 for a figure read back from a summary, whose groups hold them.
    `exactness` speaks of the per-position values, the interval of the sampling of documents. alike: whether the
    documents show no spread, so that the interval rests on a bound that needs none (`stats.rare`).
    """

    value: float | None
    interval: Interval
    se: float | None = None
    n: int = 0
    documents: int = 0
    exactness: Exactness = "exact"
    alike: bool = False

    @property
    def low(self) -> float | None:
        """The lower end of the interval."""
        return self.interval.low

    @property
    def high(self) -> float | None:
        """The upper end of the interval."""
        return self.interval.high

    @property
    def known(self) -> float:
        """The value of a figure that is more than bounded.

        Raises:
            ScoreError: only bounds are known.
        """
        if self.value is None:
            raise ScoreError("only bounds of this figure are known: ask a source that gives whole distributions")
        return self.value

    def between(self, low: float | None, high: float | None) -> Figure:
        """The same figure with other ends of its interval."""
        return replace(self, interval=self.interval.between(low, high))

    def document(self) -> dict[str, Any]:
        """The figure as one flat JSON object, as `slices --json` and `compare --json` print it."""
        return {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "se": self.se,
            "n": self.n,
            "clusters": self.documents,
            "method": self.interval.method,
            "confidence": self.interval.confidence,
            "exactness": self.exactness,
        }


@dataclass(frozen=True)
class Limits:
    """What a figure has to keep: low <= figure <= high, None = no limit on that side."""

    low: float | None = None
    high: float | None = None

    def verdict(self, interval: Interval) -> Verdict:
        """pass when the interval is wholly inside the limits, fail when it is wholly outside one, else undecided.

        An open end is inside nothing and outside nothing.
        """
        if (self.high is not None and interval.low is not None and interval.low > self.high) or (
            self.low is not None and interval.high is not None and interval.high < self.low
        ):
            return "fail"
        inside_high = self.high is None or (interval.high is not None and interval.high <= self.high)
        inside_low = self.low is None or (interval.low is not None and interval.low >= self.low)
        return "pass" if inside_high and inside_low else "undecided"

    def hold(self, value: float) -> bool:
        """Whether a value is inside."""
        return self.verdict(Interval(value, value)) == "pass"


@dataclass(frozen=True)
class LayerKind:
    """Layers of one kind that are stored alike, as the server counts them (serve.models.layers)."""

    kind: str
    layers: int
    parameters: int
    bytes: int
    scheme: str
    activations: str = ""
    dequantized: bool = False

    @property
    def bits(self) -> float | None:
        """Bits per weight; None where it is not known how many weights there are."""
        return 8 * self.bytes / self.parameters if self.parameters else None


@dataclass(frozen=True)
class SourceInfo:
    """What is known about one source, as the manifest records it."""

    spec: str
    name: str
    kind: Literal["embedded", "endpoint", "trace"]
    vocab_size: int
    context_length: int
    weights_hash: str = ""
    tokenizer_hash: str = ""
    dtype: str = ""  # of the weights in memory
    compute_dtype: str = ""
    compute_reason: str = ""  # why it computes in that type
    logits_dtype: str = ""
    load_mode: str = ""  # how the weights came to be: "as stored", "GGUF dequantized to float32", ...
    scheme: str = ""  # conversion on load, "" where none
    backend: str = ""  # packed, padded or alone, and why
    attention: str = ""
    noise_floor: float | None = None  # nats: the largest logprob difference its load check saw
    kl_floor: float | None = None  # nats: the mean KL of the model against itself in its load check
    template_hash: str = ""  # of the chat template, "" where there is none or it is not known
    layers: tuple[LayerKind, ...] = ()
    load_seconds: float | None = None  # of reading it, with its conversion
    extra: dict[str, str] = field(default_factory=dict)


def counted(number: int, noun: str) -> str:
    """`1 document`, `1,234 documents`: a number with what it counts."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def sized(number: float) -> str:
    """Bytes as people read them: `512 bytes`, `241 MB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.3g} TB"
