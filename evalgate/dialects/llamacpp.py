"""llama-server's own /completion with `n_probs`: ids and bytes, raw softmax, prefix cache.

The server has no prompt logprobs and silently ignores `echo`, so each position is a request of its own.
`cache_prompt` makes a growing prefix cost one token; a cache hit changes the last digits. `n_probs: 0`
returns nothing, so at least 1 is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evalgate.core import Window
from evalgate.dialects import listings
from evalgate.dialects.base import Ask, Asking, Capabilities, Dialect, Exchange, Place, Reply, Request
from evalgate.dialects.body import check_prompt, read_body
from evalgate.dialects.findings import Body, Findings, ask
from evalgate.dialects.generation import Generation, Step, new_ids
from evalgate.dialects.listings import Listing
from evalgate.dialects.rows import Entry, score_position
from evalgate.dialects.stepwise import Step as Scored
from evalgate.dialects.stepwise import check_forced, stepwise
from evalgate.dialects.texts import entry_of_item
from evalgate.errors import EndpointError, ScoreError

PATH = "/completion"
FORCING_BIAS = 1e6  # added to one logit: it wins whatever the others are, and the logprob stays raw


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


class _Native(Generation):
    """/completion generates one prompt at a time and always answers with ids."""

    path = PATH
    lists = False
    named_field = ""

    def fields(
        self,
        model: str,
        prompt: list[Any],
        *,
        count: int = 1,
        k: int = 5,
        temperature: float = 0.0,
        id_keys: bool = False,
    ) -> dict[str, Any]:
        return {
            "prompt": prompt,
            "n_predict": count,
            "n_probs": k,
            "temperature": temperature,
            "cache_prompt": True,
        } | ({"seed": 1} if temperature else {})

    def steps(self, body: Body) -> list[Step]:
        return listings.of_content((body or {}).get("completion_probabilities"))

    def forcings(self, token: int) -> Mapping[str, dict[str, Any]]:
        return {"logit_bias": {"logit_bias": [[token, FORCING_BIAS]]}}

    def draw(
        self, model: str, able: Capabilities, prompt: tuple[int, ...], count: int, *, seed: int
    ) -> Asking[tuple[int, ...] | None]:
        fields = self.fields(model, list(prompt), count=count, k=1, temperature=1.0)
        whole = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": seed, "samplers": ["temperature"]}
        (reply,) = yield (Request("POST", PATH, fields | whole),)
        listed = read_body(reply, Place(PATH)).get("completion_probabilities")
        return new_ids([item.get("id") for item in listed], prompt) if isinstance(listed, list) else None


def _asked(found: Findings, k: int) -> Asking[Body]:
    """One token after the probe's prompt."""
    question = found.question
    return (yield from ask(found, PATH, _Native().fields(question.model, list(question.ids), k=k), k=k))


class LlamaServer(Dialect):
    """llama-server's native path; see the top of this file."""

    summary = "llama-server's /completion with n_probs: one generated token per position"
    order = 50
    prompt_scoring = False
    lists_all = True
    generation = _Native()

    def score_window(self, window: Window, ask: Ask) -> Exchange:
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

        def read(position: int, reply: Reply) -> Scored:
            here, token = place.at(position), window.ids[position]
            body = read_body(reply, here, k=ask.k)
            entries = _entries(body, window.ids[:position], ask, here)
            if forced:
                entries[0] = check_forced(entries[0], token, "logit_bias", here)
            return Scored(score_position(token, entries, ask, here), False)

        return stepwise(window, ask, request=request, read=read)

    def recognised(self, found: Findings) -> Asking[bool]:
        """/completion answers with the probabilities of what it generated, after all ids that were sent."""
        body = yield from _asked(found, 5)
        count = (body or {}).get("tokens_evaluated", len(found.question.ids))
        honoured = isinstance((body or {}).get("completion_probabilities"), list) and count == len(found.question.ids)
        found.facts["ids_on_wire"] |= honoured
        return honoured

    def listing(self, found: Findings, k: int) -> Asking[Listing]:
        """The generated token's alternatives."""
        steps = _Native().steps((yield from _asked(found, k)))
        return steps[0][1] if steps else []


DIALECT = LlamaServer()
