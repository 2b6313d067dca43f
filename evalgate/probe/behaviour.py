"""The probe's measurements: largest k, temperature, forced tokens, repeatability, order of ties."""

from __future__ import annotations

from typing import Any, Literal

from evalgate.dialects.rows import is_sentinel
from evalgate.probe import listings
from evalgate.probe.findings import Asking, Findings, ask, complete
from evalgate.probe.listings import Listing

SAME = 0.05  # nats: above what caches and batches move a logprob, below what a temperature of 2 does
MOST_K = 1024
LLAMA_BIAS = 1e6


def largest_k(found: Findings) -> Asking[None]:
    """20 first, then up to a refusal or MOST_K, or down; bisection in between. The first refusal alone is noted."""
    good, bad, noted = 0, None, len(found.notes)
    for k in (20, 64, 256, MOST_K):
        if not found.k_from or not (yield from _serves(found, k)):
            bad = k
            break
        good = k
    while bad is not None and found.k_from and bad - good > 1:
        middle = (good + bad) // 2
        if (yield from _serves(found, middle)):
            good = middle
        else:
            bad = middle
    del found.notes[noted + 1 :]
    found.facts |= {"largest_k": good, "k_is_limit": bad is not None}


def _serves(found: Findings, k: int) -> Asking[bool]:
    """Whether k alternatives come back when k are asked for; merged texts may hide a fifth of them."""
    if found.k_from == "prompt_logprobs":
        choices = yield from complete(found, prompt_logprobs=k)
        maps = (choices[0].get("prompt_logprobs") if choices else None) or [None]
        listing, enough = listings.of_id_map(maps[-1] or maps[0]), k
    elif found.k_from == "echo":
        choices = yield from complete(found, echo=True, logprobs=k)
        tops = ((choices[0].get("logprobs") or {}).get("top_logprobs") if choices else None) or [None, None]
        listing, enough = listings.of_text_map(tops[1]), k - k // 5
    else:
        listing = listings.of_choice(next(iter((yield from complete(found, logprobs=k))), None))
        enough = k if found.facts["ids_on_wire"] else k - k // 5
    found.listings.append(listing[1:])
    return len(listing) >= enough


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
    target = _second(found)
    if target is None:
        return
    token, logprob = target
    if found.facts["best"] == "llamacpp":
        fields = {"prompt": list(found.question.ids), "n_predict": 1, "n_probs": 5, "temperature": 0}
        body = yield from ask(found, "/completion", fields | {"logit_bias": [[token, LLAMA_BIAS]]})
        own = listings.of_items((body or {}).get("completion_probabilities"))
        found.facts["forced"] = "logit_bias" if _is(own, token, logprob) else ""
        return
    for name, value in (("allowed_token_ids", [token]), ("logit_bias", {str(token): 100.0})):
        choices = yield from complete(found, logprobs=5, **{name: value}, **_id_flags(found))
        if not found.facts["forced"] and _is(_own(choices, found), token, logprob):
            found.facts["forced"] = name
    absent = next((t for t in found.question.ids if t not in listings.ids(found.plain)), None)
    if absent is not None:
        choices = yield from complete(found, logprobs=5, logprob_token_ids=[absent], **_id_flags(found))
        listing = listings.of_choice(choices[0] if choices else None)
        found.facts["logprob_token_ids"] = absent in listings.ids(listing)


def _second(found: Findings) -> tuple[int, float] | None:
    """Id and logprob of the second-best token, None where ids cannot be told."""
    ordered = sorted(found.plain, key=lambda item: -item[1])
    if len(ordered) < 2 or is_sentinel(ordered[1][1]):
        return None
    ids = key_ids(ordered[1][0], found)
    return (next(iter(ids)), ordered[1][1]) if len(ids) == 1 else None


def key_ids(key: str, found: Findings) -> frozenset[int]:
    """The ids that a listing's key may be; empty where nothing tells."""
    if key.startswith("token_id:"):
        return frozenset({int(key.removeprefix("token_id:"))})
    vocabulary = found.question.vocabulary
    return vocabulary.ids_of(key.encode()) if vocabulary is not None else frozenset()


def _own(choices: list[dict[str, Any]], found: Findings) -> Listing:
    """The generated token itself as a listing of one, keyed by id where that can be told."""
    logprobs = choices[0].get("logprobs") if choices else None
    if not isinstance(logprobs, dict):
        return []
    if isinstance(logprobs.get("content"), list):
        own = listings.of_items(logprobs["content"][:1])
    else:
        texts, values = logprobs.get("tokens") or (), logprobs.get("token_logprobs") or ()
        own = listings.of_text_map(dict(zip(texts[:1], values[:1], strict=False)))
    return [(f"token_id:{next(iter(ids))}", v) for key, v in own if len(ids := key_ids(key, found)) == 1]


def _is(own: Listing, token: int, logprob: float) -> bool:
    return bool(own) and own[0][0] == f"token_id:{token}" and abs(own[0][1] - logprob) <= SAME


def stability(found: Findings) -> Asking[None]:
    """The first request again, now cached, and four times in one batch."""
    found.facts |= {"cached_difference": None, "batch_difference": None}
    if not found.facts["generated"]:
        return
    again: list[Listing] = []
    for _ in range(2):
        choices = yield from complete(found, logprobs=5)
        again.append(listings.of_choice(choices[0] if choices else None))
    deltas = [d for listing in again if (d := listings.difference(found.first, listing)) is not None]
    found.facts["cached_difference"] = max(deltas) if deltas else None
    batch = yield from complete(found, prompt=[list(found.question.ids)] * 4, logprobs=5)
    if len(batch) == 4:
        apart = [d for c in batch if (d := listings.difference(again[-1], listings.of_choice(c))) is not None]
        found.facts["batch_difference"] = max(apart) if apart else None


def tie_order(seen: list[Listing]) -> Literal["id", "other", "unknown"]:
    """Ascending ids count as an order only after three ties: one is a coin toss."""
    ties = [ascends for listing in seen for ascends in listings.ties(listing)]
    if not all(ties):
        return "other"
    return "id" if len(ties) >= 3 else "unknown"
