"""Scores kept beside cached keys and values, packed: 12 bytes for each of the k likeliest."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from serve.engine.sequence import RowScores

_MOST_NAMED = 4  # tokens after one prefix whose own scores are kept beside the list
_FIXED_BYTES = 450  # of one kept row without its lists: two array objects, the tuple, its place in a dict


class Named(NamedTuple):
    """The score of one token that stood after the prefix; logprob in nats."""

    token: int
    logprob: float
    rank: int


class Kept(NamedTuple):
    """What was computed of the token after a prefix: scores of some that stood there, and the k likeliest.

    named: the latest first. ids and values: the k likeliest in the one order; whole: they are the whole vocabulary.
    """

    named: tuple[Named, ...]
    whole: bool
    ids: array[int]
    values: array[float]

    @property
    def bytes(self) -> int:
        """Memory that it takes, about."""
        return _FIXED_BYTES + 12 * len(self.ids)

    def serves(self, token: int, k: int) -> bool:
        """Whether it answers a request for `token` and k (-1 = the whole vocabulary)."""
        known = any(token == named.token for named in self.named) or token in self.ids
        return known and (self.whole or 0 <= k <= len(self.ids))

    def joined(self, newer: Kept) -> Kept:
        """Both of one row: the longer list, and the named tokens of the newer one before the older one's."""
        named = {each.token: each for each in (*newer.named, *self.named)}
        wider = newer if len(newer.ids) > len(self.ids) else self
        return wider._replace(named=tuple(named.values())[:_MOST_NAMED])

    def row(self, token: int, k: int) -> RowScores:
        """The answer for `token`, cut to k. The list is in the one order, so a place in it is a rank."""
        n = len(self.ids) if k == -1 else k
        found = next((named for named in self.named if named.token == token), None)
        if found is None:
            at = self.ids.index(token)
            found = Named(token, self.values[at], at + 1)
        return RowScores(*found, tuple(self.ids[:n]), tuple(self.values[:n]))


def pack(row: RowScores, k: int | None) -> Kept:
    """Keep a row that was asked for with k; ids scored by name are left out."""
    return Kept(
        (Named(row.token, row.logprob, row.rank),), k == -1, array("i", row.top_ids), array("d", row.top_logprobs)
    )
