"""Whether a server's probabilities add up to 1: llama.cpp's float32 softmax leaves up to 1.001 over a large vocabulary.

Only a list of the whole vocabulary tells. It is asked for after prefixes of several lengths, where the dialect says
that one reply may hold it, or no limit was met.
"""

from __future__ import annotations

import math
from dataclasses import replace

from evalgate.dialects.base import Asking
from evalgate.dialects.findings import Findings
from evalgate.dialects.rows import is_sentinel

WHOLE = 1 << 20  # alternatives: more than any vocabulary has
PREFIXES = 3  # of the probe's prompt
TIMES = 2.0  # the worst that was seen counts so often: a run asks about more positions than the probe
LEAST = 1e-6  # of a mass: what rounding the values to float32 leaves, which bounds count as their slack


def excess(found: Findings) -> Asking[None]:
    """The largest sum of probabilities less 1 that was seen, at least 0; None where no whole list was given."""
    found.facts["excess"] = None
    dialect, question = found.dialect, found.question
    if dialect is None or not (dialect.lists_all or not found.facts["k_is_limit"]):
        return
    seen = []
    for part in range(1, PREFIXES + 1):
        ids = question.ids[: max(1, len(question.ids) * part // PREFIXES)]
        asked = Findings(replace(question, ids=ids), facts=dict(found.facts))
        listing = yield from dialect.listing(asked, WHOLE)
        values = {key: value for key, value in listing if not is_sentinel(value)}
        if values:
            seen.append(math.fsum(map(math.exp, values.values())) - 1.0)
    if seen:
        found.facts["excess"] = max(0.0, *seen)


def in_nats(measured: float | None) -> float:
    """What bounds must count for an excess that the probe measured; 0 where that is nothing, or not known."""
    return math.log1p(TIMES * measured) if measured is not None and measured > LEAST else 0.0
