"""Pages, the radix tree and the scheduler under random traffic, without a model."""

from __future__ import annotations

import random

import pytest

from serve.engine.pages import OutOfPages, PagePool
from serve.engine.prefixes import common
from serve.engine.radix import RadixCache
from serve.engine.scheduler import Chunk, Limits, Scheduler
from serve.engine.scores import pack
from serve.engine.sequence import Ask, RowScores, Sequence
from serve.engine.waiting import Waiting


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
        pages = [*match.pages, *pool.take(len(tokens) - longest)]
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
    cache.lock(cache.match((1, 1, 1)))
    cache.match((2, 2, 2))
    assert cache.evict(1) == 3
    assert [len(cache.match((t,) * 3).pages) for t in (1, 2, 3)] == [3, 3, 0]
    assert cache.evict(6) == 3
    assert [len(cache.match((t,) * 3).pages) for t in (1, 2, 3)] == [3, 0, 0]


class FakeEngine:
    """Runs chunks without a model: the token after a prefix, and its logprob, are functions of the prefix."""

    def __init__(self, pages: int, *, tokens: int, sequences: int, scored: int | None = None) -> None:
        self.scheduler = Scheduler(PagePool(pages), Limits(tokens=tokens, sequences=sequences, scored=scored))
        self.tokens = tokens
        self.rows_run = 0
        self.preempted = 0
        self.ended: list[int] = []

    def step(self) -> list[Chunk]:
        before = list(self.scheduler.running)
        chunks = self.scheduler.schedule()
        self.preempted += sum(not s.running and not s.ended for s in before)
        assert sum(c.length for c in chunks) <= self.tokens
        places = [(c.sequence.number, j) for c in chunks for j in range(c.start, c.start + c.length)]
        assert len(places) == len(set(places)), "a token runs twice in a step"
        self.rows_run += len(places)
        for sequence, start, length, stored in chunks:
            assert sequence.running and len(sequence.block_table) >= start + length
            for each in (sequence, *sequence.nested):
                assert each.tokens[: len(each.ask.prompt)] == sequence.tokens[: len(each.ask.prompt)]
                for j in list(each.rows_needed(start, start + length)):
                    self._answer(each, j + 1)
            if not stored:
                sequence.computed = start + length
            elif length:
                first, end = sequence.recompute[0]
                assert first == start
                sequence.recompute[:1] = [(start + length, end)] if start + length < end else []
        for sequence in {c.sequence.number: c.sequence for c in chunks}.values():
            for rider in list(sequence.nested):
                answered = not rider.unscored and (rider.generated or not rider.ask.max_tokens)
                if answered and not self._end(rider):
                    self.scheduler.detach(rider)
            if not sequence.recompute and sequence.computed >= len(sequence.ask.prompt):
                if sequence.computed == len(sequence.ask.prompt):
                    self.scheduler.keep_prefix(sequence)
                self._end(sequence)
        self.scheduler.check_integrity()
        return chunks

    def _answer(self, sequence: Sequence, at: int) -> None:
        if at == len(sequence.tokens):
            sequence.tokens.append(next_token(sequence.tokens))
        if sequence.k_at(at) is not None:
            sequence.add_scores(at, scores_of(sequence.tokens[: at + 1], sequence.k_at(at) or 0))
            sequence.uncached_scores.append(at)

    def _end(self, sequence: Sequence) -> bool:
        if sequence.generated < sequence.ask.max_tokens:
            return False
        sequence.ended = True
        self.scheduler.finish(sequence)
        self.ended.append(sequence.number)
        return True


def next_token(prefix: list[int]) -> int:
    return hash(tuple(prefix)) % 2


def scores_of(tokens: list[int], k: int) -> RowScores:
    """After a prefix, id t has rank t + 1 and t nats less than the likeliest."""
    *prefix, token = tokens
    value = -float(hash(tuple(prefix)) % 1000)
    return RowScores(token, value - token, token + 1, tuple(range(k)), tuple(value - i for i in range(k)))


@pytest.mark.parametrize("seed", range(8))
def test_random_traffic_in_a_small_pool_ends_right_and_loses_no_page(seed: int) -> None:
    """Preemption, riders, shared prefixes, scores, cancellations: everyone else must end with the right answer."""
    rng = random.Random(seed)
    fake = FakeEngine(60, tokens=16, sequences=8, scored=3 if seed % 2 else None)
    made: list[Sequence] = []
    cancelled: set[int] = set()
    for _ in range(2000):
        if len(made) < 60 and (rng.random() < 0.3 or not fake.scheduler.busy):
            length, extra = rng.randrange(1, 30), rng.choice([0, 1, 1, 5, 20])
            prompt = tuple(rng.randrange(2) for _ in range(length)) if rng.random() < 0.5 else (1,) * length
            ask = Ask(prompt, extra, rng.choice([None, 2]), rng.choice([None, 0, 3]))
            made.append(Sequence(ask, lambda _: None, lambda *_: None, lambda _: None))
            fake.scheduler.add(made[-1])
        if rng.random() < 0.03 and (left := [s for s in made if not s.ended]):
            gone = rng.choice(left)
            gone.ended = True
            cancelled.add(gone.number)
            fake.scheduler.finish(gone)
            fake.scheduler.check_integrity()
        if fake.scheduler.busy:
            assert fake.step(), "something waits but nothing runs"
        elif len(made) == 60:
            break
    assert sorted(fake.ended) == sorted(s.number for s in made if s.number not in cancelled)
    assert fake.preempted > 0
    for s in made:
        if s.number in cancelled:
            continue
        grown = list(s.ask.prompt)
        for _ in range(s.ask.max_tokens):
            grown.append(next_token(grown))
        assert s.tokens == grown
        for at in range(1, len(grown)):
            k = s.k_at(at)
            assert s.rows.get(at) == (None if k is None else scores_of(grown[: at + 1], k))
    assert not fake.scheduler.busy
    fake.scheduler.cache.clear()
    assert fake.scheduler.pool.used == 0 and fake.scheduler.cache.score_bytes == 0
    fake.scheduler.check_integrity()


def run(fake: FakeEngine, *asks: Ask) -> list[Sequence]:
    made = [Sequence(ask, lambda _: None, lambda *_: None, lambda _: None) for ask in asks]
    for each in made:
        fake.scheduler.add(each)
    while fake.scheduler.busy:
        fake.step()
    return made


TEXT = tuple(range(100, 140))


def test_a_warm_prompt_request_runs_only_what_has_no_scores() -> None:
    fake = FakeEngine(500, tokens=64, sequences=8)

    def rows(*asks: Ask) -> int:
        before = fake.rows_run
        for made in run(fake, *asks):
            if (k := made.ask.prompt_logprobs) is not None:
                tokens = made.tokens
                assert made.prompt_rows == [scores_of(tokens[: at + 1], k) for at in range(1, len(made.ask.prompt))]
        return fake.rows_run - before

    assert rows(Ask(TEXT[:20], 0, prompt_logprobs=3)) == 20
    assert rows(Ask(TEXT[:20], 0, prompt_logprobs=3)) == 0
    assert rows(Ask(TEXT[:20], 0, prompt_logprobs=1)) == 0  # a smaller k is a cut
    assert rows(Ask(TEXT[:20], 1, prompt_logprobs=3)) == 1  # the next token needs the last row
    assert rows(Ask(TEXT[:20], 0, prompt_logprobs=5)) == 19  # a larger k needs every scored row
    assert rows(Ask(TEXT[:30], 0)) == 10  # nothing is asked: only new keys and values
    assert rows(Ask(TEXT[:30], 0, prompt_logprobs=4)) == 10  # rows 19..28; row 19 is the boundary
    assert rows(Ask(TEXT[:10], 0, prompt_logprobs=5)) == 0  # inside a node
    assert rows(Ask((*TEXT[:10], 7, 8), 0, prompt_logprobs=5)) == 3  # row 9 again, and two new ones
    assert rows(Ask(TEXT[:30], 0, prompt_logprobs=5, wanted=(3,))) == 29  # named ids are never kept


def test_continuations_leave_their_scores_for_a_prompt_request() -> None:
    """One-token continuations of every prefix of a text, then the text as a prompt: nothing is computed again."""
    fake = FakeEngine(500, tokens=64, sequences=8)
    text = (1, 0, 1, 2, 0, 3, 1, 1)
    for n in range(1, len(text)):
        run(fake, Ask(text[:n], 1, logprobs=4))
    run(fake, Ask(text, 0))
    before = fake.rows_run
    (made,) = run(fake, Ask(text, 0, prompt_logprobs=4))
    assert made.prompt_rows == [scores_of(list(text[: at + 1]), 4) for at in range(1, len(text))]
    assert fake.rows_run == before
    (more,) = run(fake, Ask(text, 3, logprobs=4))
    before = fake.rows_run
    (grown,) = run(fake, Ask(tuple(more.tokens), 0, prompt_logprobs=4))
    assert fake.rows_run - before == 1  # the last token alone, which had not run; its own scores are there
    assert grown.prompt_rows == [scores_of(more.tokens[: at + 1], 4) for at in range(1, len(more.tokens))]


def test_a_split_takes_its_scores_along_and_eviction_drops_them() -> None:
    fake = FakeEngine(500, tokens=64, sequences=8)
    run(fake, Ask(TEXT[:20], 0, prompt_logprobs=3), Ask((*TEXT[:7], 1, 2), 0, prompt_logprobs=3))
    cache = fake.scheduler.cache
    for tokens in (TEXT[:20], (*TEXT[:7], 1, 2)):
        kept = dict(cache.match(tokens).scores())
        assert kept.keys() == set(range(len(tokens) - 1))
        served = [at for at, score in kept.items() if score.serves(tokens[at + 1], 3)]
        assert len(served) == len(kept)  # where the two part, the row has the scores of both
        for at in served:
            assert kept[at].row(tokens[at + 1], 3) == scores_of(list(tokens[: at + 2]), 3)
    cache.check_integrity()
    cache.clear()
    assert cache.score_bytes == 0


def test_kept_scores_stay_within_their_memory() -> None:
    pool = PagePool(1000)
    cache = RadixCache(pool, score_limit=20_000)
    for first in range(30):
        tokens = (first, *TEXT[:20])
        pages = pool.take(len(tokens))
        cache.insert(tokens, pages)
        pool.release(pages)
        cache.keep_scores(tokens, {i: pack(scores_of([i], 20), 20) for i in range(len(tokens))})
        cache.check_integrity()
        assert dict(cache.match(tokens).scores()), "the newest are the last to go"
    assert cache.tokens == 30 * 21  # keys and values stay


def test_nested_prompts_are_answered_from_one_forward() -> None:
    fake = FakeEngine(500, tokens=64, sequences=8)
    made = run(fake, *[Ask(TEXT[:n], 1, logprobs=2) for n in range(1, 41)])
    assert fake.rows_run == 40
    assert sum(len(s.ask.prompt) - s.cached_tokens for s in made) == 40
    # again, over what is cached: each row that is asked for, and nothing else
    run(fake, *[Ask(TEXT[:n], 1, logprobs=2) for n in range(4, 41, 4)])
    assert fake.rows_run == 50
    # a rider that goes on by itself takes the shared prefix over
    run(fake, Ask((1, 2, 3), 5), Ask((1, 2, 3, 4, 5, 6), 1), Ask((1, 2, 3), 5))
    assert fake.rows_run <= 50 + 6 + 2 * 5


@pytest.mark.parametrize("seed", range(20))
def test_nested_prompts_are_found_among_unrelated_ones(seed: int) -> None:
    rng = random.Random(seed)
    waiting = Waiting()
    made = []
    for _ in range(80):
        prompt = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 9)))
        made.append(Sequence(Ask(prompt, 1), lambda _: None, lambda *_: None, lambda _: None))
        waiting.add(made[-1])
    for each in rng.sample(made, 20):
        waiting.remove(each)
        made.remove(each)
    assert list(waiting) == sorted(made, key=lambda s: s.number)
    for lead in made:
        nested = {s.number for s in made if s is not lead and s.tokens == lead.tokens[: len(s.tokens)]}
        assert {s.number for s in waiting.nested_in(lead)} == nested
        longest = max(len(s.tokens) for s in made if s.tokens[: len(lead.tokens)] == lead.tokens)
        assert len(waiting.longest_extension(lead).tokens) == longest


def test_prompts_with_a_long_common_start_compute_it_once() -> None:
    fake = FakeEngine(5000, tokens=256, sequences=64)
    start = tuple(range(100, 200))
    run(fake, *[Ask((*start, n, n), 1) for n in range(4)])
    assert fake.rows_run == 100 + 4 * 2


def test_common_prefix_of_runs() -> None:
    rng = random.Random(0)
    for _ in range(500):
        a, b = (tuple(rng.randrange(2) for _ in range(rng.randrange(20))) for _ in range(2))
        assert common(a, b) == _shared(a, b)


def test_decode_is_not_held_up_and_neither_short_nor_long_prompts_starve() -> None:
    fake = FakeEngine(10_000, tokens=32, sequences=64)

    def add(prompt: tuple[int, ...], extra: int) -> Sequence:
        made = Sequence(Ask(prompt, extra), lambda _: None, lambda *_: None, lambda _: None)
        fake.scheduler.add(made)
        return made

    decoding = add((1, 2), 400)
    fake.step()
    long = [add(tuple(range(i * 1000, i * 1000 + 300)), 0) for i in range(1, 21)]
    fake.step()
    short = add((5, 6, 7), 1)
    for step in range(3):
        chunks = fake.step()
        assert any(c.sequence is decoding for c in chunks), step
    assert short.ended, "a short prompt waits behind the flood of long ones"
    # and a flood of short ones leaves the oldest long prompt half of every step
    for step in range(30):
        for i in range(12):
            add((9, step, i, 1, 2, 3), 0)
        fake.step()
    assert long[0].ended


def test_a_stream_waits_for_no_more_scored_rows_than_a_step_may_have() -> None:
    fake = FakeEngine(1000, tokens=64, sequences=8, scored=5)
    stream = Sequence(Ask((1, 2, 3), 40), lambda _: None, lambda *_: None, lambda _: None)
    fake.scheduler.add(stream)
    fake.step()
    scored = [
        Sequence(
            Ask(tuple(range(low, low + 30)), 0, prompt_logprobs=1), lambda _: None, lambda *_: None, lambda _: None
        )
        for low in (100, 200)
    ]
    plain = Sequence(Ask(tuple(range(300, 340)), 1), lambda _: None, lambda *_: None, lambda _: None)
    for sequence in (*scored, plain):
        fake.scheduler.add(sequence)
    while any(s.unscored for s in scored):
        before = sum(s.unscored for s in scored)
        fake.step()
        done = before - sum(s.unscored for s in scored)
        assert 1 <= done <= 5
        assert plain.ended  # a prompt that is not scored is not held up by the bound
    assert 1 < stream.generated < 40  # it went on with every step
    while fake.scheduler.busy:
        fake.step()
    assert all(s.rows[at] == scores_of(s.tokens[: at + 1], 1) for s in scored for at in range(1, 30))


def test_where_nobody_waits_for_a_token_prompts_are_scored_whole() -> None:
    fake = FakeEngine(1000, tokens=64, sequences=8, scored=5)
    (alone,) = run(fake, Ask(tuple(range(50)), 0, prompt_logprobs=1))
    assert not alone.unscored and fake.rows_run == 50
