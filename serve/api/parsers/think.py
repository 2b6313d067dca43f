"""Reasoning between <think> and </think> (DeepSeek-R1, Qwen3 and their families)."""

from __future__ import annotations

from collections.abc import Iterator

from serve.api.events import Buffer, Delta, Kind, Span, held_back

KIND = "reasoning"
OPEN, CLOSE = "<think>", "</think>"


def fits(template: str) -> bool:
    """Whether a chat template is of such a model."""
    return OPEN in template or CLOSE in template


class ThinkParser:
    """One block of reasoning at the start, then content. The marks' tokens belong to the reasoning.

    lead: what the prompt ends with; it may have opened the block. Whitespace before the opening mark is markup.
    """

    marks = (OPEN, CLOSE)

    def __init__(self, *, lead: str = "") -> None:
        inside = lead.rfind(OPEN) > lead.rfind(CLOSE)
        self._buffer = Buffer()
        self._state = Kind.REASONING if inside else None  # None = not decided yet
        self._last = self._state or Kind.CONTENT  # of the text so far: silent tokens go with it

    def feed(self, span: Span) -> Iterator[Delta]:
        """Deltas that are certain."""
        self._buffer.add(span)
        if silent := self._buffer.take(0).tokens:
            yield Delta(self._last, "", silent)
        if self._state is None:
            yield from self._decide()
        if self._state is Kind.REASONING:
            yield from self._reason()
        if self._state is Kind.CONTENT and self._buffer.text:
            yield self._take(Kind.CONTENT, len(self._buffer.text))

    def end(self) -> Iterator[Delta]:
        """What is held back is of the kind that it was in (before any decision: content)."""
        rest = self._buffer.drain()
        yield Delta(self._state or Kind.CONTENT, rest.text, rest.tokens)

    def _decide(self) -> Iterator[Delta]:
        text = self._buffer.text.lstrip()
        if text.startswith(OPEN):
            self._state = Kind.REASONING
            yield self._hide(len(self._buffer.text) - len(text) + len(OPEN))
        elif text and not OPEN.startswith(text):
            self._state = Kind.CONTENT

    def _reason(self) -> Iterator[Delta]:
        text = self._buffer.text
        at = text.find(CLOSE)
        upto = len(text) - held_back(text, (CLOSE,)) if at < 0 else at
        if upto:
            yield self._take(Kind.REASONING, upto)
        if at >= 0:
            self._state = Kind.CONTENT
            yield self._hide(len(CLOSE))

    def _take(self, kind: Kind, count: int) -> Delta:
        span, self._last = self._buffer.take(count), kind
        return Delta(kind, span.text, span.tokens)

    def _hide(self, count: int) -> Delta:
        self._last = Kind.REASONING
        return Delta(Kind.REASONING, "", self._buffer.take(count).tokens)


PARSER = ThinkParser
