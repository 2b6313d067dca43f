"""Generated tokens to text, one at a time: split characters are held back, stop strings cut.

The text of a continuation is the UTF-8 of its tokens' bytes, joined; what is not valid reads as U+FFFD.
Control tokens are hidden unless they are asked for.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from serve.api.events import Buffer, Sampled, Span, held_back
from serve.engine.sequence import RowScores
from serve.models.tokenizer import token_bytes

_controls: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()


def control_tokens(tokenizer: Any) -> dict[int, str]:
    """Control tokens by id (remembered: a vocabulary may have thousands, and asking for them is slow)."""
    known = _controls.get(tokenizer)
    if known is None:
        added = tokenizer.added_tokens_decoder.items()
        known = _controls[tokenizer] = {int(i): str(token.content) for i, token in added if token.special}
    return known


class Read(NamedTuple):
    """What one token completes. lead: characters at the start of `text` that are not its own.

    Those are what bytes before it read as that turned out not to begin a character (U+FFFD). silent: it adds no byte.
    """

    text: str
    lead: int = 0
    silent: bool = False


class Detokenizer:
    """Bytes of tokens in, complete characters out. Chunking does not change the text."""

    def __init__(
        self, tokenizer: Any, *, hide: Collection[int] = (), hide_special: bool = True, keep: Collection[str] = ()
    ) -> None:
        """Hide the ids in `hide` and, with hide_special, control tokens other than those whose text is in `keep`."""
        self._tokenizer = tokenizer
        self._hide, self._keep = frozenset(hide), frozenset(keep)
        self._controls = control_tokens(tokenizer) if hide_special else {}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, token: int) -> Read:
        """The characters that this token completes: none for a piece of one, or for a control token that is hidden."""
        control = self._controls.get(token)
        if token in self._hide or (control is not None and control not in self._keep):
            return Read("", silent=True)
        data = token_bytes(self._tokenizer, token)
        if not data:
            return Read("", silent=True)
        begun = bool(self._decoder.getstate()[0])
        first = self._decoder.decode(data[:1])
        # The first byte goes on with what was begun (it completes it or is kept with it), or abandons it. Then the
        # decoder gives U+FFFD for the abandoned bytes first, and the token's own first character comes after.
        own = 0 if self._decoder.getstate()[0] else 1
        lead = max(0, len(first) - own) if begun else 0
        return Read(first + self._decoder.decode(data[1:]), lead)

    def text(self, token: int) -> str:
        """The text of `read`."""
        return self.read(token).text

    def rest(self) -> str:
        """What an unfinished character at the end reads as."""
        return self._decoder.decode(b"", final=True)


class Cutter:
    """Tokens of one continuation to spans of visible text, cut before the first stop string.

    Text that may be the beginning of a stop string is held back. Stop strings are not looked for in the text
    of the first `min_tokens` tokens.
    """

    def __init__(
        self, detokenizer: Detokenizer, *, stop: tuple[str, ...] = (), min_tokens: int = 0, include: bool = False
    ) -> None:
        self._detokenizer = detokenizer
        self._stop, self._include = stop, include
        self._exempt = min_tokens
        self._buffer = Buffer()
        self._count = self._characters = 0
        self.found: str | None = None

    def feed(self, token: int, row: RowScores | None) -> Span:
        """The text that is certain now, with its tokens; `found` is set when a stop string is complete."""
        text, lead, silent = self._detokenizer.read(token)
        sampled = Sampled(token, row, self._characters + lead, lead, silent)
        self._count += 1
        self._characters += len(text)
        self._buffer.add(Span(text, (sampled,)))
        if self._count <= self._exempt or not self._stop:
            return self._buffer.take(len(self._buffer.text))
        return self._cut()

    def end(self) -> Span:
        """The rest: what was held back, and what an unfinished character reads as."""
        rest = self._detokenizer.rest()
        if self.found is None:
            self._buffer.add(Span(rest))
        return self._buffer.drain()

    def _cut(self) -> Span:
        text = self._buffer.text
        places = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if not places:
            return self._buffer.take(len(text) - held_back(text, self._stop))
        at, self.found = min(places, key=lambda place: (place[0] + len(place[1]), place[0]))
        shown = self._buffer.take(at + len(self.found) if self._include else at)
        hidden = self._buffer.drain()
        return Span(shown.text, (*shown.tokens, *(t._replace(at=len(shown.text)) for t in hidden.tokens)))
