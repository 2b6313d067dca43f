"""One generated token per position over /v1/completions: any server that returns its logprob.

The prefix goes out as token ids and the alternatives of the one generated token are read. Where the server
can force the token (`allowed_token_ids`, `logit_bias`) and keeps its logprob raw, every position has a
number; elsewhere an actual token outside the k best is censored.
"""

from __future__ import annotations

from typing import Any

from evalgate.core import Window
from evalgate.dialects.base import (
    Ask,
    Asking,
    Capabilities,
    Dialect,
    Exchange,
    Place,
    PositionScore,
    Reply,
    Request,
)
from evalgate.dialects.body import check_prompt, only_choice, read_body
from evalgate.dialects.findings import Findings
from evalgate.dialects.generated import Generated, read_generated
from evalgate.dialects.generation import COMPLETIONS, forcing
from evalgate.dialects.listings import Listing
from evalgate.dialects.nested import most_again, nested_window
from evalgate.dialects.one_token import PATH, completed, fields, generated_listing, named
from evalgate.dialects.rows import score_position
from evalgate.dialects.stepwise import Step, check_forced, stepwise


class Continuation(Dialect):
    """One generated token per position; see the top of this file."""

    summary = "one generated token per position over /v1/completions; forced where the server can"
    order = 60
    prompt_scoring = False
    generation = COMPLETIONS

    def score_window(self, window: Window, ask: Ask) -> Exchange:
        """Score a window, one request per position and one more where wanted ids are not listed.

        Where the endpoint takes lists of prompts, `ask.listed` positions per request (`nested`).
        """
        if ask.listed > 1:
            return nested_window(window, ask)
        able = ask.capabilities
        place = Place(PATH, window.index)

        def body(position: int) -> dict[str, Any]:
            return fields(ask, list(window.ids[:position]))

        def request(position: int) -> Request:
            return Request("POST", PATH, body(position) | forcing(window.ids[position], able.forced))

        def answer(position: int, reply: Reply) -> Generated:
            here = place.at(position)
            parsed = read_body(reply, here, k=ask.k)
            choice = only_choice(parsed, here)
            check_prompt(parsed, choice, window.ids[:position], here)
            return read_generated(choice, ask, here)

        def read(position: int, reply: Reply) -> Step:
            here, token = place.at(position), window.ids[position]
            entries, text_keyed = answer(position, reply)
            if able.forced:
                entries[0] = check_forced(entries[0], token, able.forced, here)
            return Step(score_position(token, entries, ask, here, text_keyed=text_keyed), text_keyed)

        def more(row: PositionScore) -> Request | None:
            missing = sorted({score.token for score in row.wanted if not score.known})
            if not missing or row.unmatched or not able.logprob_token_ids:
                return None
            return Request("POST", PATH, body(row.position) | {"logprob_token_ids": missing})

        def read_more(row: PositionScore, reply: Reply) -> PositionScore:
            return completed(row, named(answer(row.position, reply)), place.at(row.position))

        return stepwise(window, ask, request=request, read=read, more=more, read_more=read_more)

    def recognised(self, found: Findings) -> Asking[bool]:
        """Generated tokens come with logprobs."""
        yield from ()
        return found.facts["generated"] and found.takes_ids

    def preferable(self, found: Findings) -> bool:
        """Where no ids come back, `openai` asks the same without fields that a server might refuse."""
        return bool(found.facts["ids_on_wire"])

    def listing(self, found: Findings, k: int) -> Asking[Listing]:
        """The generated token's alternatives."""
        return (yield from generated_listing(found, k))

    def names_ids(self, able: Capabilities) -> bool:
        """A second request names the ids."""
        return able.logprob_token_ids

    def again(self, window: Window, ask: Ask) -> int:
        """Most requests of the second round: positions with wanted ids, or what `nested` sends."""
        if ask.listed > 1:
            return most_again(window, ask)
        return (
            sum(bool(ask.wanted.get(i)) for i in ask.positions_in(window)) if ask.capabilities.logprob_token_ids else 0
        )


DIALECT = Continuation()
