"""Scores kept beside cached keys and values, packed: 12 bytes for each of the k likeliest."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from serve.engine.sequence import RowScores

_FIXED_BYTES = 400  # of one kept row without its lists: two array objects, the tuple, its place in a dict


class Kept(NamedTuple):
    """What was computed of the token after a prefix: the scores of one that stood there, and the k likeliest.

    logprob in nats; ids and values: the k likeliest in the one order; whole: they are the whole vocabulary.
    """

    token: int
    logprob: float
    rank: int
    whole: bool
    ids: array[int]
    values: array[float]

    @property
    def bytes(self) -> int:
        """Memory that it takes, about."""
        return _FIXED_BYTES + 12 * len(self.ids)

    def serves(self, token: int, k: int) -> bool:
        """Whether it answers a request for `token` and k (-1 = the whole vocabulary)."""
        return (token == self.token or token in self.ids) and (self.whole or 0 <= k <= len(self.ids))

    def row(self, token: int, k: int) -> RowScores:
        """The answer for `token`, cut to k. The list is in the one order, so a place in it is a rank."""
        n = len(self.ids) if k == -1 else k
        at = -1 if token == self.token else self.ids.index(token)
        logprob, rank = (self.logprob, self.rank) if at < 0 else (self.values[at], at + 1)
        return RowScores(token, logprob, rank, tuple(self.ids[:n]), tuple(self.values[:n]))


def pack(row: RowScores, k: int | None) -> Kept:
    """Keep a row that was asked for with k; ids scored by name are left out."""
    return Kept(row.token, row.logprob, row.rank, k == -1, array("i", row.top_ids), array("d", row.top_logprobs))
