"""The event stream under both routes: sampled tokens become text, text becomes deltas of one kind each.

A token belongs where its first character is. A piece of a split character belongs to that character. A token that
adds nothing to the text (a control token that is not shown) goes with the text before it, in a chunk of its own with
empty text. So a token's logprob never lands on text that another token made, and what a stream says in pieces is what
one reply says at once, however the text was cut on its way.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NoReturn, Protocol

from serve.engine.sequence import RowScores


class Sampled(NamedTuple):
    """One generated token and its scores (None where none were asked for).

    offset: its first character in all generated text. at: its first character within the text that carries it now.
    silent: it adds nothing to the text.
    """

    token: int
    row: RowScores | None
    offset: int
    at: int = 0
    silent: bool = False


class Span(NamedTuple):
    """Some text and the tokens that begin in it, each at its place. `tokens` may be empty, and so may `text`."""

    text: str
    tokens: tuple[Sampled, ...] = ()


class Kind(Enum):
    """What a delta is part of; the value is the reply's field."""

    CONTENT = "content"
    REASONING = "reasoning_content"
    TOOL = "tool_calls"


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for; arguments is the JSON text of an object."""

    name: str
    arguments: str

    @classmethod
    def read(cls, name: object, arguments: object) -> ToolCall | None:
        """The call of parsed JSON values; None where the name is not a string or the arguments are not an object."""
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False)
        if any("\ud800" <= c <= "\udfff" for c in name + text):  # half a UTF-16 pair cannot be sent as text
            return None
        return cls(name, text)


def refuse_constant(name: str) -> NoReturn:
    """For JSON readers: NaN and Infinity are not JSON."""
    raise ValueError(f"{name} is not JSON")


@dataclass(frozen=True)
class Delta:
    """A piece of a reply: visible text of one kind, the tokens behind it, and a call where one is complete.

    Markup (`<think>`, `<tool_call>`) is not in `text`; its tokens are in `tokens`.
    """

    kind: Kind
    text: str = ""
    tokens: tuple[Sampled, ...] = ()
    call: ToolCall | None = None

    @property
    def empty(self) -> bool:
        """Whether it says nothing."""
        return not (self.text or self.tokens or self.call)


class Parser(Protocol):
    """Turns spans into deltas; what it yields, merged, does not depend on where the spans were cut."""

    marks: tuple[str, ...]  # control tokens' texts that it must see although they are hidden from replies

    def feed(self, span: Span) -> Iterator[Delta]:
        """Take in more text."""
        ...

    def end(self) -> Iterator[Delta]:
        """No more text will come: yield what was held back."""
        ...


class Buffer:
    """Text that is not decided on yet, with the place of each token in it."""

    def __init__(self) -> None:
        self.text = ""
        self._tokens: deque[Sampled] = deque()  # `at` ascending, counted from the start of all text ever added
        self._gone = 0  # characters taken so far

    def add(self, span: Span) -> None:
        """Append a span."""
        base = self._gone + len(self.text)
        self._tokens.extend(token._replace(at=base + token.at) for token in span.tokens)
        self.text += span.text

    def take(self, count: int) -> Span:
        """Remove the first `count` characters, with the tokens that begin in them and silent ones right behind."""
        tokens = []
        end = self._gone + count
        while self._tokens and (self._tokens[0].at < end or (self._tokens[0].silent and self._tokens[0].at == end)):
            token = self._tokens.popleft()
            tokens.append(token._replace(at=token.at - self._gone))
        text, self.text = self.text[:count], self.text[count:]
        self._gone += len(text)
        return Span(text, tuple(tokens))

    def drain(self) -> Span:
        """Remove everything, with the tokens that have no character of their own."""
        span = self.take(len(self.text))
        rest = tuple(token._replace(at=len(span.text)) for token in self._tokens)
        self._tokens.clear()
        return Span(span.text, span.tokens + rest)


class Plain:
    """No parser: everything is content."""

    marks: tuple[str, ...] = ()

    def feed(self, span: Span) -> Iterator[Delta]:
        """The span as content."""
        yield Delta(Kind.CONTENT, span.text, span.tokens)

    def end(self) -> Iterator[Delta]:
        """Nothing is held back."""
        yield from ()


class Chain:
    """A reasoning parser whose content goes through a tool parser."""

    def __init__(self, reasoning: Parser, tools: Parser) -> None:
        self._reasoning, self._tools = reasoning, tools
        self.marks = reasoning.marks + tools.marks

    def feed(self, span: Span) -> Iterator[Delta]:
        """Deltas of both."""
        yield from self._through(self._reasoning.feed(span))

    def end(self) -> Iterator[Delta]:
        """What both held back, in order."""
        yield from self._through(self._reasoning.end())
        yield from self._tools.end()

    def _through(self, deltas: Iterator[Delta]) -> Iterator[Delta]:
        for delta in deltas:
            if delta.kind is Kind.CONTENT:
                yield from self._tools.feed(Span(delta.text, delta.tokens))
            else:
                yield delta


def apart(span: Span) -> Iterator[Span]:
    """The span in pieces, every silent token in one of its own with empty text."""
    low, tokens = 0, list[Sampled]()
    for token in span.tokens:
        if not token.silent:
            tokens.append(token._replace(at=token.at - low))
            continue
        if tokens or token.at > low:
            yield Span(span.text[low : token.at], tuple(tokens))
        yield Span("", (token._replace(at=0),))
        low, tokens = token.at, []
    if tokens or low < len(span.text):
        yield Span(span.text[low:], tuple(tokens))


def held_back(text: str, marks: tuple[str, ...]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `marks`."""
    longest = 0
    for mark in marks:
        for size in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:size]):
                longest = size
                break
    return longest
