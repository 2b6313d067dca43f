"""Tool calls as Hermes and Qwen write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator

from serve.api.events import Buffer, Delta, Kind, Span, ToolCall, held_back, refuse_constant

KIND = "tools"
OPEN, CLOSE = "<tool_call>", "</tool_call>"


def fits(template: str) -> bool:
    """Whether a chat template is of such a model."""
    return OPEN in template


class HermesParser:
    """Content with calls in it. A call is yielded when it is complete; a block that is not a call stays content.

    Whitespace right before a call, and after it up to the next call or the end, is markup.
    """

    marks = (OPEN, CLOSE)

    def __init__(self, *, lead: str = "") -> None:
        del lead  # the format does not depend on it
        self._buffer = Buffer()
        self._after_call = False
        self._last = Kind.CONTENT  # of the text so far: silent tokens go with it

    def feed(self, span: Span) -> Iterator[Delta]:
        """Deltas that are certain."""
        self._buffer.add(span)
        if silent := self._buffer.take(0).tokens:
            yield Delta(self._last, "", silent)
        while True:
            text = self._buffer.text
            blank = len(text) - len(text.lstrip())
            if not text.startswith(OPEN, blank):
                if not (yield from self._content()):
                    return
                continue
            close = text.find(CLOSE, blank + len(OPEN))
            if close < 0:
                return
            yield self._block(close + len(CLOSE), text[blank + len(OPEN) : close])

    def end(self) -> Iterator[Delta]:
        """A block left open is a call if it reads as one; blanks after a call are markup, the rest is content."""
        text = self._buffer.text.strip()
        if text.startswith(OPEN):
            yield self._block(None, text.removeprefix(OPEN))
            return
        rest = self._buffer.drain()
        if self._after_call and not text:
            yield Delta(Kind.TOOL, "", rest.tokens)
        else:
            yield Delta(Kind.CONTENT, rest.text, rest.tokens)

    def _content(self) -> Generator[Delta, None, bool]:
        """Content up to where a call may begin; returns whether a whole opening mark follows it."""
        text = self._buffer.text
        at = text.find(OPEN)
        upto = len(text) - held_back(text, (OPEN,)) if at < 0 else at
        upto = len(text[:upto].rstrip())
        if upto:
            span = self._buffer.take(upto)
            self._after_call, self._last = False, Kind.CONTENT
            yield Delta(Kind.CONTENT, span.text, span.tokens)
        return at >= 0

    def _block(self, count: int | None, body: str) -> Delta:
        """A block of `count` characters (None: all that is left) as a call, or as content where it is not one."""
        span = self._buffer.drain() if count is None else self._buffer.take(count)
        call = _read(body)
        if call is None:
            self._after_call, self._last = False, Kind.CONTENT
            return Delta(Kind.CONTENT, span.text, span.tokens)
        self._after_call, self._last = True, Kind.TOOL
        return Delta(Kind.TOOL, "", span.tokens, call)


def _read(body: str) -> ToolCall | None:
    try:
        value = json.loads(body, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None
    return ToolCall.read(value.get("name"), value.get("arguments", {})) if isinstance(value, dict) else None


PARSER = HermesParser
