"""Whether an endpoint seems to decode speculatively: one continuation scored as it was made, and once more.

Rejection sampling leaves the distribution alone, so that a correct speculative decoder cannot be told from its
numbers. What can be seen, and makes its generated logprobs unfit as scores: (a) the reply names drafted tokens
(`completion_tokens_details`, llama-server's `timings.draft_n`); (b) logprobs of the tokens made at once differ
from those of the same tokens scored in two other ways, one at a time and as a prompt (or one at a time backwards), by
more than SAME and four times what these two differ among themselves, or a cache or a batch was seen to change;
(c) a greedy token's logprob is not that of the best alternative.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from evalgate.dialects import listings
from evalgate.dialects.base import Asking
from evalgate.dialects.findings import COMPLETIONS, Body, Findings, ask, key_ids
from evalgate.dialects.generation import Generation, Step
from evalgate.dialects.listings import Listing
from evalgate.probe.behaviour import SAME

DRAWN = 8  # tokens


class Made(NamedTuple):
    """One generated token: its id, its own logprob (nats) and the alternatives beside it."""

    token: int
    logprob: float
    alternatives: Listing


def drafting(found: Findings) -> Asking[None]:
    """Generate DRAWN tokens at once, score them again, and compare."""
    found.facts |= {"speculative": "unknown", "speculative_difference": None}
    generation = found.generation
    if generation is None:
        return
    prompt = list(found.question.ids)
    body = yield from ask(found, generation.path, _fields(found, generation, prompt, DRAWN))
    made = _made(generation.steps(body), found)
    if len(made) < 2:
        return
    one = yield from _singly(found, generation, made)
    if found.facts["prompt_logprobs"]:
        other = yield from _as_prompt(found, [*prompt, *(m.token for m in made)])
    else:
        other = yield from _singly(found, generation, made, backwards=True)
    moved, noise = [], [0.0]
    for m, *scored in zip(made, one, other, strict=False):
        again = [_by_id(listing, found) for listing in scored]
        known = _by_id([*m.alternatives, (f"token_id:{m.token}", m.logprob)], found)
        moved += (
            [min(apart)] if (apart := [d for s in again if (d := listings.difference(known, s)) is not None]) else []
        )
        noise += [d] if (d := listings.difference(*again)) is not None else []
    if moved:
        _judge(found, max(moved), max(noise), _unlike_best(made, found), named=_names_drafts(body))


def _judge(found: Findings, moved: float, noise: float, unlike: float, *, named: bool) -> None:
    noise = max(noise, found.facts["cached_difference"] or 0.0, found.facts["batch_difference"] or 0.0)
    limit = max(SAME, 4 * noise)
    reasons = [
        *(["the reply counts drafted tokens"] if named else ()),
        *([f"logprobs made at once differ by {moved:.3g} nats from those scored again"] if moved > limit else ()),
        *([f"a greedy token lies {unlike:.3g} nats off the best alternative"] if unlike > limit else ()),
    ]
    found.facts["speculative_difference"] = moved
    found.facts["speculative"] = "suspected" if reasons else "not seen"
    if reasons:
        found.notes.append(f"speculative decoding is suspected: {'; '.join(reasons)}")


def _singly(
    found: Findings, generation: Generation, made: list[Made], *, backwards: bool = False
) -> Asking[list[Listing]]:
    """Alternatives of each token when it is generated alone after those before it, asked one after the other.

    backwards: the longest prefix first, which meets a cache in other states than the shortest first.
    """
    prompt, found_at = list(found.question.ids), {}
    for i in reversed(range(len(made))) if backwards else range(len(made)):
        fields = _fields(found, generation, prompt + [m.token for m in made[:i]], 1)
        step = _made(generation.steps((yield from ask(found, generation.path, fields))), found)
        found_at[i] = step[0].alternatives if step else []
    return [found_at[i] for i in range(len(made))]


def _fields(found: Findings, generation: Generation, prompt: list[int], count: int) -> dict[str, Any]:
    facts, model = found.facts, found.question.model
    return generation.fields(
        model, prompt, count=count, temperature=facts["temperature"], id_keys=facts["token_id_keys"]
    )


def _made(steps: list[Step], found: Findings) -> list[Made]:
    """The generated tokens whose ids are certain, up to the first that is not."""
    made: list[Made] = []
    for own, alternatives in steps:
        ids = key_ids(own[0], found)
        if len(ids) != 1:
            break
        made.append(Made(next(iter(ids)), own[1], alternatives))
    return made


def _as_prompt(found: Findings, ids: list[int]) -> Asking[list[Listing]]:
    """Alternatives of the last DRAWN ids at most, scored as a prompt."""
    fields = {"model": found.question.model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 5}
    body = yield from ask(found, COMPLETIONS, fields, k=5)
    choices = [c for c in (body or {}).get("choices") or () if isinstance(c, dict)]
    maps = (choices[0].get("prompt_logprobs") if choices else None) or []
    first = len(found.question.ids) - (1 if found.facts["off_by_one"] else 0)
    return [listings.of_id_map(row) for row in maps[first : first + len(ids) - len(found.question.ids)]]


def _by_id(listing: Listing, found: Findings) -> Listing:
    """The entries whose id is certain, keyed by it."""
    keyed = [(key_ids(key, found), value) for key, value in listing]
    return [(f"token_id:{next(iter(ids))}", value) for ids, value in keyed if len(ids) == 1]


def _unlike_best(made: list[Made], found: Findings) -> float:
    """Largest distance (nats) of a greedy token from the best alternative; 0 where tokens are sampled."""
    if found.facts["temperature"]:
        return 0.0
    return max((abs(max(v for _, v in m.alternatives) - m.logprob) for m in made if m.alternatives), default=0.0)


def _names_drafts(body: Body) -> bool:
    usage, timings = (body or {}).get("usage"), (body or {}).get("timings")
    details = usage.get("completion_tokens_details") if isinstance(usage, dict) else None
    counts = [details.get(f"{kind}_prediction_tokens") for kind in ("accepted", "rejected")] if details else []
    counts.append(timings.get("draft_n") if isinstance(timings, dict) else None)
    return any(isinstance(count, int) and count > 0 for count in counts)
