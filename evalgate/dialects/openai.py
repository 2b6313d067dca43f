"""OpenAI's completions API: `logprobs` 0..5 for one generated token, alternatives keyed by text.

The prefix goes out as token ids. No field beyond OpenAI's own is sent; unknown ones are refused there.
Texts are matched back to ids through the tokenizer's bytes; what stays ambiguous is censored.
"""

from __future__ import annotations

from dataclasses import replace

from evalgate.core import Window
from evalgate.dialects.base import Ask, Asking, Capabilities, Dialect, Exchange, Place, Reply, Request
from evalgate.dialects.body import check_prompt, only_choice, read_body
from evalgate.dialects.findings import Findings
from evalgate.dialects.generated import read_generated
from evalgate.dialects.generation import COMPLETIONS
from evalgate.dialects.listings import Listing
from evalgate.dialects.nested import nested_window
from evalgate.dialects.one_token import generated_listing
from evalgate.dialects.rows import score_position
from evalgate.dialects.stepwise import Step, stepwise
from evalgate.errors import EndpointError

PATH = "/v1/completions"
MAX_LOGPROBS = 5


def _plain(able: Capabilities) -> Capabilities:
    """Without every field that is not OpenAI's own."""
    return replace(able, token_id_keys=False, return_token_ids=False, forced="", logprob_token_ids=False)


class OpenAI(Dialect):
    """OpenAI's own fields alone; see the top of this file."""

    summary = "OpenAI completions: one generated token per position, 5 alternatives at most, keyed by text"
    order = 70
    prompt_scoring = False
    most_alternatives = MAX_LOGPROBS
    text_keyed = True
    generation = COMPLETIONS

    def score_window(self, window: Window, ask: Ask) -> Exchange:
        """Score a window, one request per position. Raises EndpointError for k over 5."""
        place = Place(PATH, window.index)
        if ask.k > MAX_LOGPROBS:
            raise place.error(
                EndpointError,
                f"OpenAI's completions serve at most {MAX_LOGPROBS} alternatives and {ask.k} were asked for",
            )

        if ask.listed > 1:
            return (yield from nested_window(window, replace(ask, capabilities=_plain(ask.capabilities))))

        def request(position: int) -> Request:
            fields = {
                "model": ask.model,
                "prompt": list(window.ids[:position]),
                "max_tokens": 1,
                "temperature": ask.capabilities.temperature,
                "logprobs": ask.k,
            }
            return Request("POST", PATH, fields)

        def read(position: int, reply: Reply) -> Step:
            here = place.at(position)
            body = read_body(reply, here, k=ask.k)
            choice = only_choice(body, here)
            check_prompt(body, choice, window.ids[:position], here)
            entries, text_keyed = read_generated(choice, ask, here)
            row = score_position(window.ids[position], entries, ask, here, text_keyed=text_keyed)
            return Step(row, text_keyed)

        return (yield from stepwise(window, ask, request=request, read=read))

    def recognised(self, found: Findings) -> Asking[bool]:
        """Generated tokens come with logprobs."""
        yield from ()
        return found.facts["generated"] and found.takes_ids

    def listing(self, found: Findings, k: int) -> Asking[Listing]:
        """The generated token's alternatives."""
        return (yield from generated_listing(found, k))


DIALECT = OpenAI()
