"""Which tokens run in the next step: decode first, then prefill in chunks, within tokens and pages.

Prefill: the oldest sequence gets at least half of what decoding leaves, so that nothing starves; the rest goes
to the shortest first, so that a short prompt does not wait behind long ones. Waiting prompts that are prefixes
of another waiting one are nested in it: the host's forward answers them all. A prompt that shares a long uncached
prefix with one that is being computed waits until that prefix is in the cache.

Pages are taken here: first free ones, then evicted prefixes, then those of the youngest running sequence,
which is preempted (it keeps its tokens and scores and is computed again later). No torch.

Words, as vLLM and SGLang use them: a block table lists the pages of a sequence, one page per token; cached tokens
are prompt tokens whose keys and values the prefix cache had; a chunk is what one sequence runs in one step.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import chain
from typing import NamedTuple, cast

from serve.engine.pages import PagePool
from serve.engine.prefixes import common
from serve.engine.radix import Match, Node, RadixCache
from serve.engine.scores import pack
from serve.engine.sequence import Sequence
from serve.engine.waiting import Waiting

_WORTH_WAITING = 32  # tokens of a shared prefix for which a prompt waits until another has computed them


class Chunk(NamedTuple):
    """Tokens [start, start + length) of a sequence run in this step.

    stored: their keys and values are in the pages already and stay as they are; only the hidden rows are wanted.
    length 0: nothing is left to run, the sequence only has to be answered.
    """

    sequence: Sequence
    start: int
    length: int
    stored: bool = False


@dataclass(frozen=True)
class Limits:
    """tokens: of one step. sequences: running at once. keeps_kv: False = every sequence runs whole, each step.

    scored: rows of prompts that are scored in one step while somebody waits for a next token: a scored row costs its
    product with the whole vocabulary, many times what running its token does. None = no bound.
    score_bytes: memory of the scores kept with cached prefixes. regime: of a sequence of n tokens, see lengths.py; the
    prefix cache holds keys, values and scores of regime 0 alone.
    """

    tokens: int
    sequences: int
    keeps_kv: bool = True
    scored: int | None = None
    score_bytes: int = 1 << 26
    regime: Callable[[int], int] = lambda n: 0


class Scheduler:
    """Waiting and running sequences of one model."""

    def __init__(self, pool: PagePool, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        self.cache = RadixCache(pool, score_limit=limits.score_bytes)
        self.waiting = Waiting()
        self.running: list[Sequence] = []
        self._scheduled: set[int] = set()  # numbers of the sequences that this step has dealt with
        self._scored: int | None = None  # rows of prompts that this step may still score

    @property
    def busy(self) -> bool:
        """Whether there is anything to run."""
        return bool(self.waiting or self.running)

    @property
    def unfinished(self) -> list[Sequence]:
        """Every sequence here: running, nested in a running one, and waiting."""
        return [*self.running, *(nested for s in self.running for nested in s.nested), *self.waiting]

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.add(sequence)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks; empty only when nothing can run. Takes the pages they need."""
        budget = self.limits.tokens
        chunks: list[Chunk] = []
        self._scheduled.clear()
        for sequence in self.running:
            if self._regime(sequence) != sequence.regime:
                self._restart(sequence)
        decoding = sorted((s for s in self.running if s.pending == 1), key=lambda s: s.number)
        self._scored = self.limits.scored if decoding else None
        for sequence in decoding:
            if budget <= 0 and self.limits.keeps_kv:
                break
            if sequence.running:  # making room for an older one may have preempted it
                budget -= self._grant(sequence, budget, chunks)
        self._prefill([s for s in self.running if s.pending != 1], budget, chunks)
        return chunks

    def finish(self, sequence: Sequence) -> None:
        """Drop a sequence that is done, failed or cancelled: its prefix goes to the cache, its pages to the pool."""
        if sequence.running:
            self.keep_prefix(sequence)
            self._release(sequence)
        elif sequence.host is not None:
            if sequence.uncached_scores and self._cacheable(sequence.host):
                # scores live in the nodes of the tree, so the tokens must be there first
                self.keep_prefix(sequence.host)
                self._keep_scores(sequence, len(sequence.tokens))
            sequence.host.nested.remove(sequence)
            sequence.host = None
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def keep_prefix(self, sequence: Sequence) -> None:
        """Put the computed prefix of a running sequence, and the scores made of it, into the cache."""
        if self._cacheable(sequence) and sequence.computed:
            n = sequence.computed
            self.cache.insert(sequence.tokens[:n], sequence.block_table[:n])
            self._keep_scores(sequence, n)

    def detach(self, nested: Sequence) -> None:
        """Let a nested sequence that has its first token go on by itself, from the prefix that its host computed."""
        if nested.host is None:
            raise ValueError("the sequence is not nested in another one")
        self.keep_prefix(nested.host)
        nested.host.nested.remove(nested)
        nested.host = None
        self.waiting.add(nested)

    def check_integrity(self) -> None:
        """Raise ValueError where pages are lost or counted wrongly (call when idle or between steps)."""
        self.pool.check_integrity()
        self.cache.check_integrity()
        held = self.cache.tokens
        if not self.running and self.pool.used != held:
            raise ValueError(f"{self.pool.used} pages are held but the idle cache has {held}")
        if not self.running and self.cache.root.locks:
            raise ValueError("nothing runs but the cache is locked")

    def _regime(self, sequence: Sequence) -> int:
        return self.limits.regime(len(sequence.tokens))

    def _cacheable(self, sequence: Sequence) -> bool:
        """Whether the prefix cache may serve and keep what is computed of the sequence."""
        return self.limits.keeps_kv and sequence.regime == 0

    def _restart(self, sequence: Sequence) -> None:
        """Drop the keys and values of a running sequence that has grown into another regime; it is computed anew."""
        self.keep_prefix(sequence)
        self._drop_pages(sequence)
        sequence.regime = self._regime(sequence)

    def _prefill(self, running: list[Sequence], budget: int, chunks: list[Chunk]) -> None:
        """Grant the rest of a step: the oldest at least half of it, then the shortest first."""
        waiting = self.waiting.oldest
        oldest = min([*running, *([waiting] if waiting else [])], key=lambda s: s.number, default=None)
        if oldest is None or (budget <= 0 and chunks):
            return
        by_length = sorted(running, key=_length)
        rest = merge(by_length, self.waiting.shortest_first(), key=_length)
        first = list(_until((s for s in rest if s is not oldest), budget // 2))
        others = sum(s.pending for s in first)
        share = max(budget - budget // 2, budget - others) if self.limits.keeps_kv else budget
        budget -= self._run_or_admit(oldest, share, chunks)
        for sequence in chain(first, (s for s in rest if s is not oldest)):
            if budget <= 0 and chunks:
                return
            budget -= self._run_or_admit(sequence, budget, chunks)

    def _run_or_admit(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Grant a running sequence its chunk, or start a waiting one; returns the tokens granted."""
        if sequence.number in self._scheduled:
            return 0
        if sequence.running:
            return self._grant(sequence, budget, chunks)
        if sequence not in self.waiting or len(self.running) >= self.limits.sequences:
            return 0
        # Not this one but the longest waiting prompt that starts with it: its forward gives this one's rows too, and
        # this one costs nothing.
        host = self.waiting.longest_extension(sequence, self.limits.regime)
        if host.number in self._scheduled or self._worth_waiting(host):
            return 0
        return self._admit(host, budget, chunks)

    def _worth_waiting(self, sequence: Sequence) -> bool:
        """Whether a running sequence is about to compute much of what this one needs."""
        if not self.limits.keeps_kv or self._regime(sequence):
            return False
        tokens = tuple(sequence.tokens)
        return any(
            common(tokens, other.ask.prompt) >= other.prefix_hit + _WORTH_WAITING
            for other in self.running
            if other.computed < len(other.ask.prompt) and not other.regime
        )

    def _admit(self, host: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Start a waiting sequence together with those nested in it; undone where it gets no room."""
        host.nested = self.waiting.nested_in(host, self.limits.regime)
        for sequence in (host, *host.nested):
            self.waiting.remove(sequence)
        for nested in host.nested:
            nested.host = host
        self._start(host)
        host.running = True
        self.running.append(host)
        before = len(chunks)
        # A waiting sequence never preempts a running one: two that do not fit together would take turns forever.
        granted = self._grant(host, budget, chunks, preempt=False)
        if len(chunks) == before:
            self._release(host)
            self.waiting.add(host)
        return granted

    def _grant(self, sequence: Sequence, budget: int, chunks: list[Chunk], *, preempt: bool = True) -> int:
        """Add the sequence's next chunks within the budget; returns their tokens (0 = no room, or nothing to run)."""
        if not self.limits.keeps_kv:
            length = len(sequence.tokens)
            if length > budget and chunks:
                return 0
            self._scheduled.add(sequence.number)
            chunks.append(Chunk(sequence, 0, length))
            return length
        self._scheduled.add(sequence.number)
        granted = 0
        for start, end in sequence.recompute:
            length = self._within_scored(sequence, start, min(end - start, budget - granted))
            if length <= 0:
                return granted
            chunks.append(Chunk(sequence, start, length, stored=True))
            granted += length
        left = len(sequence.tokens) - sequence.computed
        if not left and not granted:
            chunks.append(Chunk(sequence, sequence.computed, 0))
        length = self._within_scored(sequence, sequence.computed, min(left, budget - granted))
        length = self._fit(sequence, length, chunks, preempt=preempt)
        if length > 0:
            chunks.append(Chunk(sequence, sequence.computed, length))
            granted += length
        return granted

    def _within_scored(self, sequence: Sequence, start: int, length: int) -> int:
        """How many of tokens [start, start + length) may run, so that no more prompt rows are scored than may be."""
        if self._scored is None or length <= 0 or not any(s.unscored for s in (sequence, *sequence.nested)):
            return length
        end = start + length
        rows = sorted({row for each in (sequence, *sequence.nested) for row in each.rows_needed(start, end)})
        if len(rows) > self._scored:
            length = rows[self._scored] - start
            rows = rows[: self._scored]
        self._scored -= len(rows)
        return length

    def _fit(self, sequence: Sequence, length: int, chunks: list[Chunk], *, preempt: bool) -> int:
        """Take pages for the next `length` tokens, or for as many as there is room for; returns how many."""
        need = sequence.computed + length - len(sequence.block_table)
        if need > 0 and not self._make_room(need, sequence, chunks, preempt=preempt):
            length = min(length, len(sequence.block_table) + self.pool.free - sequence.computed)
            need = sequence.computed + length - len(sequence.block_table)
        if length > 0 and need > 0:
            sequence.block_table.extend(self.pool.take(need))
        return length

    def _make_room(self, need: int, keep: Sequence, chunks: list[Chunk], *, preempt: bool) -> bool:
        """Free pages until `need` are free: cached prefixes first, then the youngest other running sequence."""
        if self.pool.free < need:
            self.cache.evict(max(need - self.pool.free, self.pool.capacity // 256))
        while preempt and self.pool.free < need:
            younger = [s for s in self.running if s is not keep and s.number > keep.number]
            if not younger:
                return False
            # Only younger ones: the oldest sequence is never preempted, so it always gets to its end.
            victim = max(younger, key=lambda s: s.number)
            self._release(victim)
            self.waiting.add(victim)
            chunks[:] = [chunk for chunk in chunks if chunk.sequence is not victim]
            self.cache.evict(need - self.pool.free)
        return self.pool.free >= need

    def _start(self, sequence: Sequence) -> None:
        """Use what the cache has, pages of the prefix and scores; and find which of those rows must run again."""
        sequence.computed, sequence.block_table, sequence.recompute, sequence.prefix_hit = 0, array("q"), [], 0
        sequence.regime = self._regime(sequence)
        if not self._cacheable(sequence):
            return
        match = self.cache.match(sequence.tokens)
        # The last token's row gives the next token, and the cache has no hidden rows: that token runs in any case.
        usable = min(len(match.pages), len(sequence.tokens) - sequence.generates)
        needed: set[int] = set()
        for each in (sequence, *sequence.nested):
            _take_scores(each, match)
            needed.update(each.rows_needed(0, usable))
        sequence.block_table = match.pages[:usable]
        self.pool.share(sequence.block_table)
        sequence.node = self.cache.lock(match)
        sequence.computed = sequence.prefix_hit = usable
        # Rows without a kept score run once more over the cached keys and values, which they do not write.
        sequence.recompute = _ranges(needed)
        if not sequence.generated:
            sequence.cached_tokens = usable - len(needed)
        for nested in sequence.nested:
            if not nested.generated:
                nested.cached_tokens = len(nested.ask.prompt)

    def _keep_scores(self, sequence: Sequence, n: int) -> None:
        """Keep the sequence's new scores with the prefix of n tokens that they were made of.

        The score of the token at p is kept with the token before it, which predicts it: so the last token of a
        continuation leaves its scores too, though it never ran itself.
        """
        known = {p - 1: pack(sequence.rows[p], sequence.k_at(p)) for p in sequence.uncached_scores if p <= n}
        if known:
            sequence.uncached_scores = [p for p in sequence.uncached_scores if p > n]
            self.cache.keep_scores(sequence.tokens[:n], known)

    def _release(self, sequence: Sequence) -> None:
        """Out of the running ones: pages and lock back, nested ones to the queue; it starts anew if it runs again."""
        self.running.remove(sequence)
        sequence.running = False
        for nested in sequence.nested:
            nested.host = None
            self.waiting.add(nested)
        sequence.nested = []
        self._drop_pages(sequence)

    def _drop_pages(self, sequence: Sequence) -> None:
        """Give pages and lock back: nothing of the sequence is computed any more."""
        self.pool.release(sequence.block_table)
        if sequence.node is not None:
            self.cache.unlock(cast(Node, sequence.node))
        sequence.block_table, sequence.node, sequence.computed, sequence.recompute = array("q"), None, 0, []


def _length(sequence: Sequence) -> tuple[int, int]:
    return sequence.pending, sequence.number


def _until(sequences: Iterable[Sequence], tokens: int) -> Iterator[Sequence]:
    """The first sequences that together have `tokens` to run, or all of them."""
    total = 0
    for sequence in sequences:
        yield sequence
        total += sequence.pending
        if total >= tokens:
            return


def _take_scores(sequence: Sequence, match: Match) -> None:
    """Answer prompt positions from kept scores, where they are wide enough and no ids are asked for by name."""
    k = sequence.ask.prompt_logprobs
    if not sequence.unscored or k is None or sequence.ask.wants:
        return
    end = len(sequence.ask.prompt)
    for before, kept in match.scores():
        position = before + 1
        if position < end and position not in sequence.rows and kept.serves(sequence.tokens[position], k):
            sequence.add_scores(position, kept.row(sequence.tokens[position], k))


def _ranges(rows: set[int]) -> list[tuple[int, int]]:
    """Ascending, disjoint half-open ranges that cover exactly `rows`."""
    ranges: list[tuple[int, int]] = []
    for row in sorted(rows):
        if ranges and ranges[-1][1] == row:
            ranges[-1] = (ranges[-1][0], row + 1)
        else:
            ranges.append((row, row + 1))
    return ranges
