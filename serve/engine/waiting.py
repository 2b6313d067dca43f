"""Sequences that have not started: by age, by length, and by which prompts are nested in which.

Sorted by tokens, everything that starts with a prompt stands in one run right behind it, and its prefixes stand
somewhere before it. Both are found by bisection and neighbours, so that thousands of waiting prompts (a probe of every
prefix of a text) cost little more than a few.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Any

from serve.engine.prefixes import common
from serve.engine.sequence import Sequence


class Waiting:
    """A queue with three orders. A sequence's tokens do not change while it waits."""

    def __init__(self) -> None:
        self._by_age = _Order(lambda s: (s.number,))
        self._by_length = _Order(lambda s: (len(s.tokens), s.number))
        self._by_tokens = _Order(lambda s: (tuple(s.tokens), s.number))

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; its age is its number, so that one that comes back keeps its place."""
        for order in (self._by_age, self._by_length, self._by_tokens):
            order.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; raises ValueError where it is not in."""
        for order in (self._by_age, self._by_length, self._by_tokens):
            order.remove(sequence)

    def __len__(self) -> int:
        return len(self._by_age.items)

    def __iter__(self) -> Iterator[Sequence]:
        """Oldest first."""
        return iter(self._by_age.items)

    def __contains__(self, sequence: Sequence) -> bool:
        return self._by_age.find(sequence) is not None

    @property
    def oldest(self) -> Sequence | None:
        """The one that has waited longest."""
        return self._by_age.items[0] if self._by_age.items else None

    def shortest_first(self) -> list[Sequence]:
        """A copy of the queue by length, the older of equals first."""
        return list(self._by_length.items)

    def longest_extension(self, sequence: Sequence, regime: Callable[[int], int] = lambda n: 0) -> Sequence:
        """The longest waiting sequence that starts with all of this one's tokens (itself where there is none).

        Of the same regime: its forward then has this one's rows.
        """
        tokens = tuple(sequence.tokens)
        keys, items = self._by_tokens.keys, self._by_tokens.items
        best = sequence
        for at in range(bisect_left(keys, (tokens,)), len(keys)):
            if keys[at][0][: len(tokens)] != tokens:
                break
            longer = len(items[at].tokens) > len(best.tokens)
            if longer and regime(len(items[at].tokens)) == regime(len(tokens)):
                best = items[at]
        return best

    def nested_in(self, host: Sequence, regime: Callable[[int], int] = lambda n: 0) -> list[Sequence]:
        """The waiting sequences of its regime, other than `host`, whose tokens are a prefix of its; longest first."""
        tokens = tuple(host.tokens)
        keys, items = self._by_tokens.keys, self._by_tokens.items
        found: list[Sequence] = []
        length = len(tokens)  # every prefix longer than this has been found
        at = bisect_right(keys, (tokens, float("inf"))) - 1
        while at >= 0 and length > 0:
            here = keys[at][0]
            same = common(here, tokens[:length])
            if same == len(here):
                if items[at] is not host and regime(len(here)) == regime(len(tokens)):
                    found.append(items[at])
                at -= 1
            else:
                # Keys between tokens[:same] and `here` start with tokens[:same] and go on with a smaller token than
                # ours, so none of them is a prefix: jump to the last key that can be one.
                length = same
                at = min(at - 1, bisect_right(keys, (tokens[:length], float("inf"))) - 1)
        return found


class _Order:
    """Sequences sorted by a key."""

    def __init__(self, key: Callable[[Sequence], tuple[Any, ...]]) -> None:
        self._key = key
        self.keys: list[tuple[Any, ...]] = []
        self.items: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        key = self._key(sequence)
        at = bisect_right(self.keys, key)
        self.keys.insert(at, key)
        self.items.insert(at, sequence)

    def remove(self, sequence: Sequence) -> None:
        at = self.find(sequence)
        if at is None:
            raise ValueError("the sequence is not waiting")
        del self.keys[at], self.items[at]

    def find(self, sequence: Sequence) -> int | None:
        key = self._key(sequence)
        at = bisect_left(self.keys, key)
        return at if at < len(self.keys) and self.keys[at] == key else None
