"""Which tokens run in the next step: decode first, then prefill in chunks, within tokens and pages.

Pages are taken here: first free ones, then evicted prefixes, then those of the youngest running sequence,
which is preempted (it keeps its tokens and is computed again later). No torch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, cast

from serve.engine.pages import PagePool
from serve.engine.radix import Node, RadixCache
from serve.engine.sequence import Sequence


class Chunk(NamedTuple):
    """Tokens [start, start + length) of a sequence run in this step."""

    sequence: Sequence
    start: int
    length: int


@dataclass(frozen=True)
class Limits:
    """tokens: of one step. sequences: running at once. keeps_kv: False = every sequence runs whole, each step."""

    tokens: int
    sequences: int
    keeps_kv: bool = True


class Scheduler:
    """Waiting and running sequences of one model."""

    def __init__(self, pool: PagePool, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        self.cache = RadixCache(pool)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def busy(self) -> bool:
        """Whether there is anything to run."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks; empty only when nothing can run. Takes the pages they need."""
        budget = self.limits.tokens
        chunks: list[Chunk] = []
        for sequence in sorted(self.running, key=lambda s: (s.pending > 1, s.number)):
            if budget <= 0 and self.limits.keeps_kv:
                break
            if sequence in self.running:  # a preemption may have moved it
                budget -= self._grant(sequence, budget, chunks)
        while self.waiting and (budget > 0 or not chunks) and len(self.running) < self.limits.sequences:
            sequence = self.waiting[0]
            self._start(sequence)
            granted = self._grant(sequence, budget, chunks, preempt=False)
            if not granted:
                self._stop(sequence)
                break
            self.waiting.popleft()
            self.running.append(sequence)
            budget -= granted
        return [chunk for chunk in chunks if chunk.sequence in self.running]

    def finish(self, sequence: Sequence) -> None:
        """A sequence is done (or failed, or cancelled): its computed prefix goes to the cache, its pages back."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._keep(sequence)
            self._stop(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def keep_prefix(self, sequence: Sequence) -> None:
        """Put a running sequence's computed prefix into the cache, so that others can share it already."""
        self._keep(sequence)

    def check_integrity(self) -> None:
        """Raise ValueError where pages are lost or counted wrongly (call when idle or between steps)."""
        self.pool.check_integrity()
        self.cache.check_integrity()
        held = self.cache.tokens
        if not self.running and self.pool.used != held:
            raise ValueError(f"{self.pool.used} pages are held but the idle cache has {held}")

    def _grant(self, sequence: Sequence, budget: int, chunks: list[Chunk], *, preempt: bool = True) -> int:
        """Add the sequence's next chunk within the budget; returns its tokens (0 = no room)."""
        if not self.limits.keeps_kv:
            length = len(sequence.tokens)
            if length > budget and chunks:
                return 0
            chunks.append(Chunk(sequence, 0, length))
            return length
        length = min(sequence.pending, budget)
        need = sequence.computed + length - len(sequence.pages)
        if need > 0 and not self._make_room(need, sequence, preempt=preempt):
            fits = self.pool.free
            length = min(length, len(sequence.pages) + fits - sequence.computed)
            if length <= 0:
                return 0
            need = sequence.computed + length - len(sequence.pages)
        if need > 0:
            sequence.pages.extend(self.pool.take(need))
        chunks.append(Chunk(sequence, sequence.computed, length))
        return length

    def _make_room(self, need: int, keep: Sequence, *, preempt: bool) -> bool:
        """Free pages until `need` are free: cached prefixes first, then the youngest other running sequence."""
        if self.pool.free < need:
            self.cache.evict(need - self.pool.free)
        while preempt and self.pool.free < need:
            younger = [s for s in self.running if s is not keep and s.number > keep.number]
            if not younger:
                return False
            victim = max(younger, key=lambda s: s.number)
            self.running.remove(victim)
            self._stop(victim)
            self.waiting.appendleft(victim)
            self.cache.evict(need - self.pool.free)
        return self.pool.free >= need

    def _start(self, sequence: Sequence) -> None:
        """Take over what the cache has of the sequence's prefix; at least its last token is left to compute."""
        sequence.computed, sequence.pages = 0, []
        if not self.limits.keeps_kv or sequence.scores_prompt:
            return
        match = self.cache.match(sequence.tokens[: len(sequence.tokens) - 1])
        self.pool.share(match.pages)
        self.cache.lock(match.node)
        sequence.pages, sequence.node = list(match.pages), match.node
        sequence.computed = len(match.pages)
        if not sequence.generated:
            sequence.cached = sequence.computed

    def _keep(self, sequence: Sequence) -> None:
        """Insert the computed prefix into the cache."""
        if self.limits.keeps_kv and sequence.computed:
            n = sequence.computed
            self.cache.insert(sequence.tokens[:n], sequence.pages[:n])

    def _stop(self, sequence: Sequence) -> None:
        """Give back the sequence's pages and lock; it starts anew if it runs again."""
        self.pool.release(sequence.pages)
        if sequence.node is not None:
            self.cache.unlock(cast(Node, sequence.node))
        sequence.pages, sequence.node, sequence.computed = [], None, 0
