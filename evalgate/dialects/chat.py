"""Chat with an assistant prefill: the reply is continued by one token, `top_logprobs` 0..20.

The turns and the text of ids[start:i] go out as an unfinished assistant message
(`continue_final_message`). The server tokenizes it itself, so each prefix must come to the same number of
tokens as here (or, where ids come back, to the same ids); a prefix that does not is censored, and where
none does the template or the tokenizer is another one and the window is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from evalgate.core import Window
from evalgate.dialects import listings
from evalgate.dialects.base import Ask, Asking, Dialect, Exchange, Place, Reply, Request
from evalgate.dialects.body import only_choice, prompt_tokens, read_body
from evalgate.dialects.findings import Findings
from evalgate.dialects.findings import ask as question
from evalgate.dialects.generated import read_generated
from evalgate.dialects.listings import Listing
from evalgate.dialects.rows import score_position, unscored, window_scores
from evalgate.dialects.stepwise import Step, stepwise
from evalgate.dialects.texts import needed_vocabulary
from evalgate.errors import EndpointError, ScoreError, UsageError

PATH = "/v1/chat/completions"
_CUT = "the prefix ends inside a character"
_OTHER = "the server tokenizes this prefix otherwise"


def _prefixes(window: Window, ask: Ask, place: Place) -> dict[int, str | None]:
    """position -> text of ids[start:position], None where it is not whole characters."""
    if ask.chat is None:
        raise place.error(UsageError, "the dialect 'chat' scores chat documents only: choose another dialect")
    vocabulary, start = needed_vocabulary(ask, place), ask.chat.start
    texts: dict[int, str | None] = {}
    for position in ask.positions_in(window):
        if position < start:
            raise place.at(position).error(UsageError, "only the last assistant turn can be scored through chat")
        data = b"".join(vocabulary.bytes_of(t) for t in window.ids[start:position])
        try:
            texts[position] = data.decode()
        except UnicodeDecodeError:
            texts[position] = None
    return texts


def _fields(ask: Ask, text: str) -> dict[str, Any]:
    turns = [m.wire() for m in (ask.chat.messages if ask.chat else ())]
    fields: dict[str, Any] = {
        "model": ask.model,
        "max_tokens": 1,
        "temperature": ask.capabilities.temperature,
        "logprobs": True,
        "top_logprobs": ask.k,
    }
    if text:
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
        turns.append({"role": "assistant", "content": text})
    if ask.capabilities.return_token_ids:
        fields["return_token_ids"] = True
    return fields | {"messages": turns}


def _same_prompt(body: dict[str, Any], choice: dict[str, Any], prefix: tuple[int, ...], place: Place) -> bool:
    """Whether the server read exactly `prefix`: by ids where they come back, else by their number."""
    ids = choice.get("prompt_token_ids", body.get("prompt_token_ids"))
    if ids is not None:
        return isinstance(ids, list) and tuple(ids) == prefix
    count = prompt_tokens(body, place)
    if count is None:
        raise place.error(EndpointError, "the reply has no usage.prompt_tokens: what was scored cannot be checked")
    return count == len(prefix)


class Chat(Dialect):
    """Chat with an unfinished answer; see the top of this file."""

    summary = "chat with an unfinished assistant message: one generated token per position, top_logprobs 0..20"
    order = 80
    prompt_scoring = False
    most_alternatives = 20
    text_keyed = True
    chat = "messages"

    def score_window(self, window: Window, ask: Ask) -> Exchange:
        """Score the assistant tokens of a chat window, one request per position.

        Raises UsageError where the window is not a chat or a position lies before its last turn.
        """
        place = Place(PATH, window.index)
        texts = _prefixes(window, ask, place)
        asked = tuple(i for i in ask.positions_in(window) if texts[i] is not None)

        def request(position: int) -> Request:
            return Request("POST", PATH, _fields(ask, texts[position] or ""))

        def read(position: int, reply: Reply) -> Step:
            here = place.at(position)
            body = read_body(reply, here, k=ask.k)
            choice = only_choice(body, here)
            if not _same_prompt(body, choice, window.ids[:position], here):
                return Step(unscored(window.ids[position], ask, position, _OTHER), True)
            entries, keyed = read_generated(choice, ask, here)
            return Step(score_position(window.ids[position], entries, ask, here, text_keyed=keyed), keyed)

        if not asked:
            raise place.error(ScoreError, "no position's prefix is whole text: nothing can be asked")
        part = yield from stepwise(window, replace(ask, positions=asked), request=request, read=read)
        if all(row.chosen.why == _OTHER for row in part.rows):
            raise place.error(
                ScoreError, "the server's prompt never has the ids sent: another chat template or tokenizer"
            )
        done = {row.position: row for row in part.rows}
        rows = [done.get(i) or unscored(window.ids[i], ask, i, _CUT) for i in ask.positions_in(window)]
        return window_scores(window, ask, rows, text_keyed=part.text_keyed)

    def recognised(self, found: Findings) -> Asking[bool]:
        """A chat's first token comes with alternatives."""
        listing = yield from self.listing(found, 2)
        found.listings.append(listing)
        return bool(listing)

    def listing(self, found: Findings, k: int) -> Asking[Listing]:
        """The first token's alternatives after the probe's text as a user's turn."""
        turns = [{"role": "user", "content": found.question.text}]
        fields = {"model": found.question.model, "messages": turns, "max_tokens": 1, "temperature": 0}
        body = yield from question(found, PATH, fields | {"logprobs": True, "top_logprobs": k}, k=k)
        return listings.of_choice(((body or {}).get("choices") or [None])[0])


DIALECT = Chat()
