"""Alternatives of a reply as (key, logprob) lists, for the probe: what came, in the order it came."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from evalgate.dialects.rows import is_sentinel

Listing = list[tuple[str, float]]  # key: "token_id:N" where the id is known, else the text


def of_choice(choice: dict[str, Any] | None) -> Listing:
    """The alternatives of the first generated token; empty where there are none."""
    logprobs = (choice or {}).get("logprobs")
    if not isinstance(logprobs, dict):
        return []
    content = logprobs.get("content")
    if isinstance(content, list):
        first = content[0] if content and isinstance(content[0], dict) else {}
        return of_items(first.get("top_logprobs"))
    return of_text_map(next(iter(logprobs.get("top_logprobs") or ()), None))


def steps_of(choice: dict[str, Any] | None) -> list[tuple[tuple[str, float], Listing]]:
    """Of each generated token its own (key, logprob) and its alternatives, up to the first that has none."""
    logprobs = (choice or {}).get("logprobs")
    if not isinstance(logprobs, dict):
        return []
    if isinstance(logprobs.get("content"), list):
        return of_content(logprobs["content"])
    columns = [logprobs.get(name) or () for name in ("tokens", "token_logprobs", "top_logprobs")]
    return [((str(t), float(v)), of_text_map(top)) for t, v, top in zip(*columns, strict=False) if _number(v)]


def of_content(items: Any) -> list[tuple[tuple[str, float], Listing]]:
    """`[{id?, token, logprob, top_logprobs}]`, in the shape of `steps_of`."""
    whole = [item for item in items or () if of_items([item])]
    return [(of_items([item])[0], of_items(item.get("top_logprobs"))) for item in whole]


def of_text_map(listed: Any) -> Listing:
    """`{text: logprob}`."""
    return [(k, float(v)) for k, v in listed.items() if _number(v)] if isinstance(listed, dict) else []


def of_id_map(row: Any) -> Listing:
    """`{"<id>": {logprob}}`."""
    items = row.items() if isinstance(row, dict) else ()
    return [(f"token_id:{k}", float(v["logprob"])) for k, v in items if isinstance(v, dict) and _number(v["logprob"])]


def of_items(items: Any) -> Listing:
    """`[{id?, token, logprob}]`."""
    return [
        (f"token_id:{t['id']}" if t.get("id") is not None else str(t.get("token")), float(t["logprob"]))
        for t in items or ()
        if isinstance(t, dict) and _number(t.get("logprob"))
    ]


def of_triples(items: Any) -> Listing:
    """`[[logprob, id, text]]`."""
    return [(f"token_id:{t[1]}", float(t[0])) for t in items or () if isinstance(t, list) and _number(t[0])]


def ids(listing: Listing) -> list[int]:
    """The ids among the keys, in order."""
    return [int(key.removeprefix("token_id:")) for key, _ in listing if key.startswith("token_id:")]


def difference(one: Listing, other: Listing) -> float | None:
    """Largest change (nats) of a logprob that both list; None where they share fewer than two."""
    there = dict(other)
    deltas = [abs(v - there[k]) for k, v in one if k in there and not is_sentinel(v) and not is_sentinel(there[k])]
    return max(deltas) if len(deltas) > 1 else None


def ties(listing: Listing) -> list[bool]:
    """For each pair of neighbours with equal logprobs, whether their ids ascend."""
    keyed = [(int(k.removeprefix("token_id:")), v) for k, v in listing if k.startswith("token_id:")]
    return [a < b for (a, x), (b, y) in pairwise(keyed) if x == y and not is_sentinel(x)]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
