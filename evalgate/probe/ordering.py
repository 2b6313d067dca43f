"""How continuations of one window cost least: how many prefixes a request may hold, and which order a cache likes.

The same number of nested prefixes is sent in several ways, each way over tokens of its own, so that none finds
what another left in a prefix cache. Compared are the prompt tokens that the endpoint says it computed, and the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal

from evalgate.dialects import listings
from evalgate.dialects.base import Asking, Place, Reply, Request
from evalgate.dialects.body import read_body
from evalgate.dialects.findings import COMPLETIONS, Findings, complete
from evalgate.dialects.generation import Generation
from evalgate.errors import EndpointError
from evalgate.probe.behaviour import SAME
from evalgate.probe.certificate import Cost

NESTED = 16  # prefixes of each way
LENGTH = 96  # tokens of the longest one
SLACK = 1.25  # computed tokens this far above the fewest are as good: then the time decides
LISTS = (64, 512)
MOST_AT_ONCE = 8  # requests
_WHOLE = 5  # every fifth prompt of a tried list is the whole text: another order than that sent shows
_WAYS: tuple[tuple[Literal["ascending", "descending"], int], ...] = (
    ("ascending", 1),
    ("descending", 1),
    ("ascending", 4),
    ("ascending", MOST_AT_ONCE),
)


def ordering(found: Findings) -> Asking[None]:
    """Lists first, then each way; nothing where windows are scored with one request each."""
    found.facts |= {"prompt_list": 1, "continuation_costs": (), "cheapest": None}
    dialect, generation = found.dialect, found.generation
    if dialect is None or dialect.prompt_scoring or generation is None:
        return
    if generation.lists:
        yield from _lists(found)
    ways = [(order, at_once, 1) for order, at_once in _WAYS]
    if found.facts["prompt_list"] > 1:
        ways.append(("ascending", 1, NESTED))
    costs: list[Cost] = []
    for number, way in enumerate(ways):
        cost = yield from _cost(found, generation, number, *way)
        costs += [] if cost is None else [cost]
    found.facts |= {"continuation_costs": tuple(costs), "cheapest": cheapest(costs)}


def cheapest(costs: Sequence[Cost]) -> Cost | None:
    """The quickest of those that compute about as little as any; None where nothing was measured.

    Where the endpoint does not tell what it computed, the time alone decides.
    """
    told = [c for c in costs if c.computed is not None]
    least = min((c.computed for c in told if c.computed is not None), default=0)
    pool = [c for c in told if (c.computed or 0) <= SLACK * least] if len(told) == len(costs) else list(costs)
    return min(pool, key=lambda c: c.seconds, default=None)


def _lists(found: Findings) -> Asking[None]:
    """The longest list of prompts that is answered prompt by prompt, each as when it is asked alone."""
    ids, noted = [*found.question.ids], len(found.notes)
    flags = {"return_tokens_as_token_ids": True} if found.facts["token_id_keys"] else {}
    for size in LISTS:
        prompts = [ids[: max(1, len(ids) - n % _WHOLE)] for n in range(size)]
        choices = yield from complete(found, prompt=prompts, logprobs=5, **flags)
        whole = [listings.of_choice(c) for c in choices[::_WHOLE]]
        moved = [listings.difference(found.plain, listing) for listing in whole]
        indices = [c.get("index") for c in choices]
        if indices != list(range(size)) or any(d is None or d > SAME for d in moved):
            break
        found.facts["prompt_list"] = size
    del found.notes[noted:]  # a refusal is an answer


def _cost(
    found: Findings,
    generation: Generation,
    number: int,
    order: Literal["ascending", "descending"],
    at_once: int,
    listed: int,
) -> Asking[Cost | None]:
    """One way's cost, None where the endpoint refuses."""
    tokens = _tokens(found, number)
    prefixes = [tokens[:end] for end in range(max(2, len(tokens) - NESTED + 1), len(tokens) + 1)]
    if order == "descending":
        prefixes.reverse()
    sent: list[Any] = prefixes if listed == 1 else [prefixes]
    seconds, computed = 0.0, 0
    told = True
    for start in range(0, len(sent), at_once):
        some = sent[start : start + at_once]
        bodies = [generation.fields(found.question.model, prompt) for prompt in some]
        replies = yield tuple(Request("POST", generation.path, fields) for fields in bodies)
        try:
            ran = [_computed(reply) for reply in replies]
        except EndpointError as error:
            found.notes.append(error.message)
            return None
        seconds += max(r.ended for r in replies) - min(r.began for r in replies)
        told = told and None not in ran
        computed += sum(n or 0 for n in ran)
    return Cost(order, at_once, listed, seconds, computed if told else None)


def _tokens(found: Findings, number: int) -> list[int]:
    """The probe's text again and again up to LENGTH or the context, begun at another place for each way."""
    first, *rest = found.question.ids
    context = found.facts["context_length"] or LENGTH + 1
    turned = rest[number + 1 :] + rest[: number + 1]
    times = LENGTH // len(turned) + 1
    return [first, *chain.from_iterable([turned] * times)][: max(4, min(LENGTH, context - 1))]


def _computed(reply: Reply) -> int | None:
    """Prompt tokens that were not taken from a cache, None where the reply does not tell."""
    body = read_body(reply, Place(COMPLETIONS))
    timings, usage = body.get("timings"), body.get("usage")
    if isinstance(timings, dict) and isinstance(timings.get("prompt_n"), int):
        return int(timings["prompt_n"])
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return count - cached if isinstance(cached, int) and isinstance(count, int) else None
