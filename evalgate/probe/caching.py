"""What a prefix cache changes: the same positions asked cold, over a cached shorter prefix, and again.

A run asks growing prefixes, or windows that begin alike, and so meets caches in states that a single request never
meets. On llama.cpp's server cold requests repeat to the bit, while the same prefix on a growing cache moves by
hundredths of a nat. So the probe asks as a run does, through the dialect that the run will use.
"""

from __future__ import annotations

from itertools import chain

from evalgate.dialects import listings
from evalgate.dialects.base import Asking, Dialect, PositionScore, WindowScores
from evalgate.dialects.findings import Findings
from evalgate.dialects.listings import Listing

TEXTS = 2  # each asked cold once: what was asked before is cached
LENGTH = 24  # tokens of each
STEPS = 6  # prefixes that grow into a whole one
K = 5


def caching(found: Findings) -> Asking[None]:
    """Fill cached_difference; None where the dialect cannot be asked yet, or fewer than two alternatives are shared."""
    found.facts["cached_difference"] = None
    dialect = found.dialect
    readable = found.facts["ids_on_wire"] or found.question.vocabulary is not None
    if dialect is None or dialect.chat == "messages" or not readable:
        return
    k = min(K, found.facts["largest_k"])
    texts = [_text(found, turn) for turn in range(TEXTS)]
    cold = []
    for ids in texts:  # all of them before any is asked again: a cache with one place forgets the others
        cold.append(_last((yield from found.scored(dialect, k=k, ids=ids)), len(ids) - 1))
    moved: list[float] = []
    for ids, first in zip(texts, cold, strict=True):
        for other in (yield from _warm(found, dialect, ids, k)):
            moved += [d] if (d := listings.difference(first, other)) is not None else []
    found.facts["cached_difference"] = max(moved, default=None)


def _warm(found: Findings, dialect: Dialect, ids: tuple[int, ...], k: int) -> Asking[list[Listing]]:
    """The last position over a cache that grew up to it, then over one that holds it."""
    last, longer = len(ids) - 1, (*ids, *ids[1:STEPS])
    if dialect.prompt_scoring:  # a longer window over the cached shorter one
        grown = yield from found.scored(dialect, k=k, ids=longer, positions=(last,))
    else:
        grown = yield from found.scored(dialect, k=k, ids=ids, positions=tuple(range(last - STEPS + 1, last + 1)))
    again = yield from found.scored(dialect, k=k, ids=ids)
    return [_last(grown, last), _last(again, last)]


def _last(scores: WindowScores | None, position: int) -> Listing:
    """What is known for certain at a position; empty where nothing came."""
    row = next((r for r in scores.rows if r.position == position), None) if scores is not None else None
    return [] if row is None else _known(row)


def _known(row: PositionScore) -> Listing:
    own = {row.chosen.token: row.chosen.low} if row.chosen.known else {}
    known = own | dict(zip(row.top_ids, row.top_logprobs, strict=True))
    return [(f"token_id:{token}", value) for token, value in known.items()]


def _text(found: Findings, turn: int) -> tuple[int, ...]:
    """The probe's text again and again up to LENGTH or the context, begun at another place for each turn."""
    first, *rest = found.question.ids
    start = len(rest) - 1 - turn  # from the end: the probe's other questions begin at the front
    turned = rest[start:] + rest[:start]
    context = found.facts["context_length"] or LENGTH + STEPS + 1
    most = max(4, min(LENGTH, context - STEPS - 1))
    return tuple([first, *chain.from_iterable([turned] * (LENGTH // len(turned) + 1))][:most])
