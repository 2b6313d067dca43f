"""Tool calls as Llama 3 writes them: the whole reply is JSON, {"name": ..., "parameters": {...}}, `;` between."""

from __future__ import annotations

import json
from collections.abc import Iterator

from serve.api.events import Buffer, Delta, Kind, Span, ToolCall, refuse_constant

KIND = "tools"
TAG = "<|python_tag|>"


def fits(template: str) -> bool:
    """Whether a chat template is of such a model."""
    return TAG in template or ("ipython" in template and '"parameters"' in template)


class Llama3Parser:
    """A reply that begins with `{` (or the python tag) is held back to its end and read as calls.

    One that does not read as calls is content, all of it.
    """

    marks = (TAG,)

    def __init__(self, *, lead: str = "") -> None:
        del lead  # the format does not depend on it
        self._buffer = Buffer()
        self._content = False

    def feed(self, span: Span) -> Iterator[Delta]:
        """Content at once where the reply is not a call."""
        self._buffer.add(span)
        if silent := self._buffer.take(0).tokens:
            yield Delta(Kind.CONTENT, "", silent)
        text = self._buffer.text.lstrip()
        if text and not (text.startswith(("{", TAG)) or TAG.startswith(text)):
            self._content = True
        if self._content and self._buffer.text:
            taken = self._buffer.take(len(self._buffer.text))
            yield Delta(Kind.CONTENT, taken.text, taken.tokens)

    def end(self) -> Iterator[Delta]:
        """The calls, or the held back text as content."""
        rest = self._buffer.drain()
        calls = [] if self._content else _read(rest.text.strip().removeprefix(TAG))
        if not calls:
            yield Delta(Kind.CONTENT, rest.text, rest.tokens)
            return
        yield Delta(Kind.TOOL, "", rest.tokens, calls[0])
        for call in calls[1:]:
            yield Delta(Kind.TOOL, call=call)


def _read(text: str) -> list[ToolCall]:
    """Every call of the text; [] where anything in it is not a call."""
    calls: list[ToolCall] = []
    decoder = json.JSONDecoder(parse_constant=refuse_constant)
    text = text.strip()
    while text:
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return []
        fields = value if isinstance(value, dict) else {}
        call = ToolCall.read(fields.get("name"), fields.get("parameters", fields.get("arguments")))
        if call is None:
            return []
        calls.append(call)
        text = text[end:].strip().removeprefix(";").strip()
    return calls


PARSER = Llama3Parser
