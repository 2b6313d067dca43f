"""llama-server's own /completion with `n_probs`: ids and bytes, raw softmax, prefix cache.

The server has no prompt logprobs and silently ignores `echo`, so each position is a request of its own.
`cache_prompt` makes a growing prefix cost one token; a cache hit changes the last digits. `n_probs: 0`
returns nothing, so at least 1 is asked for.
"""

from __future__ import annotations

from typing import Any

from evalgate.core import Window
from evalgate.dialects.base import Ask, Dialect, Exchange, Place, Reply, Request
from evalgate.dialects.body import check_prompt, read_body
from evalgate.dialects.rows import Entry, score_position
from evalgate.dialects.stepwise import Step, check_forced, stepwise
from evalgate.dialects.texts import entry_of_item
from evalgate.errors import EndpointError, ScoreError

PATH = "/completion"
FORCING_BIAS = 1e6  # added to one logit: it wins whatever the others are, and the logprob stays raw


def score_window(window: Window, ask: Ask) -> Exchange:
    """Score a window, one request per position; the token is forced where `logit_bias` was found to work."""
    place = Place(PATH, window.index)
    forced = ask.capabilities.forced == "logit_bias"

    def request(position: int) -> Request:
        fields: dict[str, Any] = {
            "prompt": list(window.ids[:position]),
            "n_predict": 1,
            "n_probs": max(ask.k, 1),
            "temperature": 0,
            "cache_prompt": True,
            "post_sampling_probs": False,
        }
        if forced:
            fields["logit_bias"] = [[window.ids[position], FORCING_BIAS]]
        return Request("POST", PATH, fields)

    def read(position: int, reply: Reply) -> Step:
        here, token = place.at(position), window.ids[position]
        body = read_body(reply, here, k=ask.k)
        entries = _entries(body, window.ids[:position], ask, here)
        if forced:
            entries[0] = check_forced(entries[0], token, "logit_bias", here)
        return Step(score_position(token, entries, ask, here), False)

    return stepwise(window, ask, request=request, read=read)


def _entries(body: dict[str, Any], prefix: tuple[int, ...], ask: Ask, place: Place) -> list[Entry]:
    """entries[0] is the generated token. Raises where the prompt was not read whole or nothing came back."""
    if body.get("truncated"):
        raise place.error(ScoreError, "the prompt was truncated: use a shorter --context or start llama-server with -c")
    check_prompt(body, {}, prefix, place, count=body.get("tokens_evaluated"))
    listed = body.get("completion_probabilities")
    if listed is None:
        raise place.error(EndpointError, "the reply has no completion_probabilities: is this llama-server?")
    if not isinstance(listed, list) or len(listed) != 1 or not isinstance(listed[0], dict):
        raise place.error(ScoreError, "the reply does not hold exactly one generated token")
    top = listed[0].get("top_logprobs")
    if not isinstance(top, list):
        raise place.error(ScoreError, "top_logprobs is missing: is this an old llama-server, or post_sampling_probs?")
    own = entry_of_item(listed[0], ask, place, beside=True)
    return [own, *(entry_of_item(item, ask, place) for item in top)]


DIALECT = Dialect(
    summary="llama-server's /completion with n_probs: one generated token per position",
    prompt_scoring=False,
    score_window=score_window,
)
