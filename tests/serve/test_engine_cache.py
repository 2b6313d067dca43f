"""Pages, the radix tree and the scheduler under random traffic, without a model."""

from __future__ import annotations

import random

import pytest

from serve.engine.pages import OutOfPages, PagePool
from serve.engine.radix import RadixCache
from serve.engine.scheduler import Limits, Scheduler
from serve.engine.sequence import Ask, Sequence


def test_pages_are_counted_and_come_back() -> None:
    pool = PagePool(4)
    first = pool.take(3)
    with pytest.raises(OutOfPages):
        pool.take(2)
    assert pool.free == 1
    pool.share(first[:1])
    pool.release(first)
    assert pool.free == 3
    pool.release(first[:1])
    assert pool.free == 4
    with pytest.raises(ValueError, match="released more often"):
        pool.release(first[:1])
    pool.check_integrity()


def test_match_finds_the_longest_prefix_of_what_was_inserted() -> None:
    rng = random.Random(0)
    pool = PagePool(10_000)
    cache = RadixCache(pool)
    stored: list[tuple[int, ...]] = []
    for _ in range(300):
        tokens = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 12)))
        match = cache.match(tokens)
        longest = max((_shared(tokens, other) for other in stored), default=0)
        assert len(match.pages) == longest
        pages = match.pages + pool.take(len(tokens) - longest)
        cache.insert(tokens, pages)
        pool.release(pages[longest:])  # the tree keeps its own reference
        stored.append(tokens)
        cache.check_integrity()
        pool.check_integrity()
    assert pool.used == cache.tokens
    assert cache.clear() == pool.capacity - pool.free + 0 or pool.used == 0
    assert pool.used == 0


def _shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def test_the_least_recently_used_leaf_goes_first_and_locked_ones_stay() -> None:
    pool = PagePool(9)
    cache = RadixCache(pool)
    for tokens in ((1, 1, 1), (2, 2, 2), (3, 3, 3)):
        pages = pool.take(3)
        cache.insert(tokens, pages)
        pool.release(pages)
    cache.lock(cache.match((1, 1, 1)).node)
    cache.match((2, 2, 2))
    assert cache.evict(1) == 3
    assert [len(cache.match((t,) * 3).pages) for t in (1, 2, 3)] == [3, 3, 0]
    assert cache.evict(6) == 3
    assert [len(cache.match((t,) * 3).pages) for t in (1, 2, 3)] == [3, 0, 0]


def sequence(prompt: tuple[int, ...], max_tokens: int, ended: list[int]) -> Sequence:
    made = Sequence(Ask(prompt, max_tokens), lambda _: None, lambda *_: None, lambda _: None)
    made.on_end = lambda _: ended.append(made.number)
    return made


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_in_a_small_pool_ends_and_loses_no_page(seed: int) -> None:
    """A fake engine: computing a chunk only advances counters. Preemption must happen and everyone must finish."""
    rng = random.Random(seed)
    scheduler = Scheduler(PagePool(60), Limits(tokens=16, sequences=8))
    ended: list[int] = []
    made = []
    for _ in range(40):
        length, extra = rng.randrange(1, 30), rng.randrange(0, 20)
        made.append(sequence(tuple(rng.randrange(2) for _ in range(length)), extra, ended))
        scheduler.add(made[-1])
    preempted = 0
    for _ in range(5000):
        if not scheduler.busy:
            break
        running = set(map(id, scheduler.running))
        chunks = scheduler.schedule()
        preempted += len(running - set(map(id, scheduler.running)))
        assert chunks, "something waits but nothing runs"
        assert sum(c.length for c in chunks) <= 16
        for chunk in chunks:
            s = chunk.sequence
            assert len(s.pages) >= chunk.start + chunk.length
            s.computed = chunk.start + chunk.length
            if s.pending == 0:
                if s.generated < s.ask.max_tokens:
                    s.tokens.append(rng.randrange(2))
                if s.generated >= s.ask.max_tokens:
                    scheduler.finish(s)
                    s.on_end(ValueError())
        scheduler.check_integrity()
    assert sorted(ended) == sorted(s.number for s in made)
    assert not scheduler.busy
    scheduler.check_integrity()
    scheduler.cache.clear()
    assert scheduler.pool.used == 0


def test_decode_is_not_held_up_by_a_flood_of_long_prompts() -> None:
    scheduler = Scheduler(PagePool(10_000), Limits(tokens=32, sequences=64))
    ended: list[int] = []
    short = sequence((1, 2), 50, ended)
    scheduler.add(short)
    for i in range(20):
        scheduler.add(sequence(tuple(range(i, i + 300)), 0, ended))
    for step in range(10):
        chunks = scheduler.schedule()
        assert any(c.sequence is short for c in chunks), step
        for c in chunks:
            c.sequence.computed = c.start + c.length
            if c.sequence is short:
                short.tokens.append(5)
