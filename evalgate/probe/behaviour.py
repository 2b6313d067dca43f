"""The probe's measurements: largest k, temperature, forced tokens, repeatability, order of ties."""

from __future__ import annotations

from typing import Literal

from evalgate.dialects import listings
from evalgate.dialects.base import Asking, Dialect
from evalgate.dialects.findings import Findings, ask, complete, key_ids
from evalgate.dialects.generation import Step
from evalgate.dialects.listings import Listing
from evalgate.dialects.rows import is_sentinel

SAME = 0.05  # nats: above what caches and batches move a logprob, below what a temperature of 2 does
MOST_K = 1024


def largest_k(found: Findings) -> Asking[None]:
    """20 first, then up to a refusal or MOST_K, or down; bisection in between. The first refusal alone is noted."""
    dialect = found.dialect
    found.facts |= {"largest_k": 0, "k_is_limit": True}
    if dialect is None:
        return
    good, bad, noted = 0, None, len(found.notes)
    most = MOST_K if dialect.most_alternatives is None else dialect.most_alternatives
    for k in dict.fromkeys(min(k, most) for k in (20, 64, 256, MOST_K)):
        if not (yield from _serves(found, dialect, k)):
            bad = k
            break
        good = k
    while bad is not None and bad - good > 1:
        middle = (good + bad) // 2
        if (yield from _serves(found, dialect, middle)):
            good = middle
        else:
            bad = middle
    del found.notes[noted + 1 :]
    found.facts |= {"largest_k": good, "k_is_limit": bad is not None or good == dialect.most_alternatives}


def _serves(found: Findings, dialect: Dialect, k: int) -> Asking[bool]:
    """Whether k alternatives come back when k are asked for; texts that merge may hide a fifth of them."""
    listing = yield from dialect.listing(found, k)
    found.listings.append(listing[1:])  # the first may be the actual or the generated token
    by_id = len(listings.ids(listing)) == len(listing)
    return len(listing) >= (k if by_id else k - k // 5)


def temperature(found: Findings) -> Asking[None]:
    """Raw logprobs do not move with the temperature."""
    found.facts |= {"temperature_scaled": None, "temperature": 0.0}
    if not found.facts["generated"]:
        return
    flags = _id_flags(found)
    one: Listing = []
    two: Listing = []
    for degree, into in ((1.0, one), (2.0, two)):
        choices = yield from complete(found, logprobs=5, temperature=degree, seed=1, **flags)
        into += listings.of_choice(choices[0] if choices else None)
    moved = listings.difference(one, two)
    found.facts["temperature_scaled"] = None if moved is None else moved > SAME
    from_greedy = listings.difference(found.plain, one)
    if found.facts["temperature_scaled"] and from_greedy is not None and from_greedy > SAME:
        found.facts["temperature"] = 1.0


def _id_flags(found: Findings) -> dict[str, bool]:
    return {"return_tokens_as_token_ids": True} if found.facts["token_id_keys"] else {}


def forced(found: Findings) -> Asking[None]:
    """Force the second-best token and see whether it comes with its raw logprob."""
    found.facts |= {"forced": "", "logprob_token_ids": False}
    target, generation = _second(found), found.generation
    if target is None or generation is None:
        return
    token, logprob = target
    plain = generation.fields(found.question.model, list(found.question.ids), id_keys=found.facts["token_id_keys"])
    for name, fields in generation.forcings(token).items():
        body = yield from ask(found, generation.path, plain | fields)
        if not found.facts["forced"] and _is(_own(generation.steps(body), found), token, logprob):
            found.facts["forced"] = name
    absent = next((t for t in found.question.ids if t not in listings.ids(found.plain)), None)
    if generation.named_field and absent is not None:
        body = yield from ask(found, generation.path, plain | {generation.named_field: [absent]})
        steps = generation.steps(body)
        found.facts["logprob_token_ids"] = bool(steps) and absent in listings.ids(steps[0][1])


def _second(found: Findings) -> tuple[int, float] | None:
    """Id and logprob of the second-best token, None where ids cannot be told."""
    ordered = sorted(found.plain, key=lambda item: -item[1])
    if len(ordered) < 2 or is_sentinel(ordered[1][1]):
        return None
    ids = key_ids(ordered[1][0], found)
    return (next(iter(ids)), ordered[1][1]) if len(ids) == 1 else None


def _own(steps: list[Step], found: Findings) -> Listing:
    """The generated token itself as a listing of one, keyed by id where that can be told."""
    own = [step[0] for step in steps[:1]]
    return [(f"token_id:{next(iter(ids))}", v) for key, v in own if len(ids := key_ids(key, found)) == 1]


def _is(own: Listing, token: int, logprob: float) -> bool:
    return bool(own) and own[0][0] == f"token_id:{token}" and abs(own[0][1] - logprob) <= SAME


def batches(found: Findings) -> Asking[None]:
    """What changes when the same prompt is sent four times in one request."""
    found.facts["batch_difference"] = None
    if not found.facts["generated"]:
        return
    alone = yield from complete(found, logprobs=5)
    batch = yield from complete(found, prompt=[list(found.question.ids)] * 4, logprobs=5)
    if alone and len(batch) == 4:
        one = listings.of_choice(alone[0])
        apart = [d for c in batch if (d := listings.difference(one, listings.of_choice(c))) is not None]
        found.facts["batch_difference"] = max(apart) if apart else None


def tie_order(seen: list[Listing]) -> Literal["id", "other", "unknown"]:
    """Ascending ids count as an order only after three ties: one is a coin toss."""
    ties = [ascends for listing in seen for ascends in listings.ties(listing)]
    if not all(ties):
        return "other"
    return "id" if len(ties) >= 3 else "unknown"
