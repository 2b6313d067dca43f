"""How many prompts may be answered by another model though the sample shows few of them, or none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST_UNSEEN = 0.05  # "same" says that no more prompts than this are answered by another model


@dataclass(frozen=True)
class Differing:
    """Documents whose prompts were continued, how many differed, and the share that may differ beyond them.

    most: upper limit of the share among documents like these, wrong with the probability asked for (Clopper and
    Pearson 1934; none of G gives 1 - alarm^(1/G)).
    """

    documents: int
    found: int
    most: float


def differing(
    series: Iterable[tuple[Sequence[float], Sequence[str]]], *, tolerance: float, alarm: float
) -> Differing | None:
    """Documents whose mean is above the tolerance in any series of (values, documents); None without values."""
    from scipy.stats import beta

    seen: set[str] = set()
    above: set[str] = set()
    for values, documents in series:
        by_document: dict[str, list[float]] = {}
        for value, document in zip(values, documents, strict=True):
            by_document.setdefault(document, []).append(value)
        seen |= by_document.keys()
        above |= {name for name, found in by_document.items() if sum(found) / len(found) > tolerance}
    if not seen:
        return None
    n, k = len(seen), len(above)
    return Differing(n, k, 1.0 if k == n else float(beta.isf(alarm, k + 1, n - k)))


def documents_needed(alarm: float, *, found: int = 0) -> int:
    """Fewest documents that bound the share by MOST_UNSEEN where `found` of them differ."""
    from scipy.stats import binom

    few, enough = found, found + 1
    while binom.cdf(found, enough, MOST_UNSEEN) > alarm:
        few, enough = enough, 2 * enough
    while enough - few > 1:  # more documents, less probability: halve what is left
        middle = (few + enough) // 2
        few, enough = (middle, enough) if binom.cdf(found, middle, MOST_UNSEEN) > alarm else (few, middle)
    return enough
