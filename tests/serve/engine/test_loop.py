"""The engine's answers against the model's own forward: alone, in batches, cold, cached, chunked, preempted, padded."""

from __future__ import annotations

import copy
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from serve.config import EngineConfig
from serve.engine.loop import Engine
from serve.engine.pair import ScoreJob, ScoreWindow
from serve.engine.sequence import Ask, Finished, RowScores
from serve.errors import BadRequest, Draining, NotFound, ServeError
from tests.serve.architectures import BUILDERS, PADDED, SIX, built, loaded, own_logits, perturbed, tokens
from tests.stuck import STUCK

LIMIT = 1e-5


@contextmanager
def engine(*models: Any, names: tuple[str, ...] = ("tiny",), **sizes: Any) -> Iterator[Engine]:
    made = Engine(
        [loaded(copy.deepcopy(m), n) for m, n in zip(models, names, strict=True)],
        EngineConfig(**{"max_logprobs": -1, "kv_memory": 1 << 22, "check_idle": True, **sizes}),
    )
    made.start()
    try:
        yield made
    finally:
        made.stop()
        made.check_integrity()


class Reply:
    """Everything that the engine said about one request."""

    def __init__(self) -> None:
        self.prompt: list[RowScores] | None = None
        self.tokens: list[int] = []
        self.scores: list[RowScores | None] = []
        self.end: Finished | Exception | None = None
        self.done = threading.Event()
        self.text: tuple[int, ...] = ()

    def on_token(self, token: int, scores: RowScores | None) -> None:
        self.tokens.append(token)
        self.scores.append(scores)

    def on_prompt(self, rows: list[RowScores]) -> None:
        assert self.prompt is None
        self.prompt = list(rows)

    def on_end(self, end: Finished | Exception) -> None:
        assert self.end is None
        self.end = end
        self.done.set()

    def wait(self) -> Reply:
        assert self.done.wait(STUCK)
        if isinstance(self.end, Exception):
            raise self.end
        return self


def steps_of(made: Engine) -> int:
    """Steps counted so far, read between two steps: a reply arrives before its own step is counted."""
    read: list[int] = []
    ready = threading.Event()
    made.call(lambda: (read.append(made.steps), ready.set())[1])
    assert ready.wait(STUCK)
    return read[0]


def submit(made: Engine, ask: Ask) -> Reply:
    reply = Reply()
    reply.text = ask.prompt
    made.submit(made.model(None), ask, on_prompt=reply.on_prompt, on_token=reply.on_token, on_end=reply.on_end)
    return reply


def hold(made: Engine) -> threading.Event:
    """Keep the engine's thread busy until the event is set, so that what is submitted meanwhile waits together."""
    go = threading.Event()

    def wait() -> None:
        go.wait(STUCK)

    made.call(wait)
    return go


def expected(model: Any, ids: tuple[int, ...]) -> np.ndarray:
    return torch.log_softmax(own_logits(model, ids), dim=-1).numpy()


@pytest.mark.parametrize("name", [*BUILDERS, *PADDED])
def test_prompt_scores_and_continuations_agree_with_the_models_own_forward(name: str) -> None:
    model, ids = built(name), tokens(30)
    lp = expected(model, ids)
    with engine(model) as made:
        assert made.model(None).backend.startswith("padded" if name in PADDED else "packed")
        prompt = submit(made, Ask(ids, 0, prompt_logprobs=5)).wait().prompt
        assert prompt is not None and [row.token for row in prompt] == list(ids[1:])
        for at, row in enumerate(prompt):
            order = sorted(range(lp.shape[1]), key=lambda v: (-lp[at, v], v))
            assert row.logprob == pytest.approx(lp[at, row.token], abs=LIMIT)
            assert row.rank == order.index(row.token) + 1
            assert list(row.top_ids) == order[:5]
            np.testing.assert_allclose(row.top_logprobs, lp[at, order[:5]], atol=LIMIT)
        reply = submit(made, Ask(ids, 3, logprobs=0)).wait()
        grown = ids
        for token, scores in zip(reply.tokens, reply.scores, strict=True):
            row_lp = expected(model, grown)[-1]
            assert token == int(row_lp.argmax())
            assert scores is not None and scores.logprob == pytest.approx(row_lp[token], abs=LIMIT)
            grown = (*grown, token)


@pytest.mark.parametrize("name", [*BUILDERS, *PADDED])
def test_packed_padded_and_own_forward_agree(name: str) -> None:
    from serve.engine.packed import PackedRunner
    from serve.engine.padded import PaddedRunner
    from serve.engine.runner import Segment

    lengths = (30, 3, 17)
    sequences = [tokens(n, seed=n) for n in lengths]
    flat = [t for ids in sequences for t in ids]
    starts = np.cumsum([0, *lengths[:-1]])
    segments = [Segment(int(s), n) for s, n in zip(starts, lengths, strict=True)]
    runners: list[Any] = [PaddedRunner(loaded(copy.deepcopy(built(name))))]
    if name in BUILDERS:
        runners.append(PackedRunner(loaded(copy.deepcopy(built(name)))))
    for runner in runners:
        hidden = runner.forward(flat, segments)
        for ids, segment in zip(sequences, segments, strict=True):
            with torch.inference_mode():
                own = built(name).base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
            got = hidden[segment.row : segment.row + segment.length]
            torch.testing.assert_close(got, own, atol=1e-5, rtol=1e-5)


def test_a_model_that_cannot_run_in_batches_runs_one_sequence_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from serve.engine.padded import PaddedRunner
    from serve.engine.selfcheck import prepare

    model = loaded(copy.deepcopy(built("llama")))
    monkeypatch.setattr(model.model.config, "layer_types", ["mamba"], raising=False)
    own = PaddedRunner._forward

    def forward(self: Any, ids: Any, segments: Any) -> torch.Tensor:
        if len(segments) > 1:
            raise RuntimeError("one row only\nsecond line")
        return own(self, ids, segments)

    monkeypatch.setattr(PaddedRunner, "_forward", forward)
    checked = prepare(model)
    assert checked.runner.name == "alone" and checked.deviation == 0
    assert checked.backend == (
        "alone (it has layers of kind 'mamba'; padded, the probe failed (RuntimeError: one row only))"
    )


@pytest.mark.parametrize("name", BUILDERS)
def test_rows_of_a_cached_sequence_are_computed_together(name: str) -> None:
    """Tokens anywhere in a sequence that lies in pages, and in prefixes of it, beside a new sequence."""
    from serve.engine.packed import PackedRunner
    from serve.engine.runner import Segment

    ids, other = tokens(30), tokens(9, seed=1)
    runner = PackedRunner(loaded(copy.deepcopy(built(name))))
    runner.allocate(64)
    pages = array("q", torch.randperm(64, generator=torch.Generator().manual_seed(5))[:39].tolist())
    runner.forward(ids, [Segment(0, 30, 0, pages[:30])])
    parts = [(3, 4), (7, 11), (29, 30), (0, 1), (12, 13)]
    flat, segments = list(other), [Segment(0, 9, 0, pages[30:])]
    for start, end in parts:
        segments.append(Segment(len(flat), end - start, start, pages[:end], stored=True))
        flat += ids[start:end]
    hidden = runner.forward(flat, segments)
    (part,) = runner.context.together
    assert part.tokens.tolist() == [29, 12, 7, 8, 9, 10, 3, 0] and len(runner.context.segments) == 1
    with torch.inference_mode():
        own = built(name).base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        new = built(name).base_model(input_ids=torch.tensor([other]), use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(hidden[:9], new, atol=1e-5, rtol=1e-5)
    wanted = torch.cat([own[start:end] for start, end in parts])
    torch.testing.assert_close(hidden[9:], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SIX)
def test_alone_in_a_batch_cold_and_cached_are_equal(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    ids = tokens(40)
    with engine(built(name)) as made:
        alone = submit(made, Ask(ids, 0, prompt_logprobs=0)).wait().prompt or []
    with engine(built(name)) as made:
        others = [submit(made, Ask(tokens(5 + i, seed=100 + i), 2, prompt_logprobs=0)) for i in range(32)]
        batched = submit(made, Ask(ids, 0, prompt_logprobs=0)).wait().prompt or []
        for other in others:
            other.wait()
    with engine(built(name)) as made:
        # one-token continuations of the growing prefix, each over what the last one cached
        cached, hits = [], []
        for n in range(1, len(ids)):
            reply = submit(made, Ask(ids[:n], 1, logprobs=-1)).wait()
            row = reply.scores[0]
            assert row is not None
            cached.append(row.top_logprobs[row.top_ids.index(ids[n])])
            assert isinstance(reply.end, Finished)
            hits.append(reply.end.cached_tokens)
    values = np.array([row.logprob for row in alone])
    in_batch = np.abs(values - [row.logprob for row in batched]).max()
    from_cache = np.abs(values - cached).max()
    with capsys.disabled():
        print(f"\n{name}: alone against a batch of 33: {in_batch:.2g}, cold against cached: {from_cache:.2g} nats")
    assert in_batch < LIMIT and from_cache < LIMIT
    assert hits == list(range(len(ids) - 1))  # every continuation computed exactly its last token


def test_chunks_and_preemption_do_not_change_an_answer() -> None:
    """A pool and a budget so small that prompts are cut and sequences preempted, against a roomy engine."""
    asks = [Ask(tokens(10 + 3 * i, seed=i), 12, logprobs=2, prompt_logprobs=1) for i in range(8)]
    with engine(built("gemma3")) as made:
        roomy = [reply.wait() for reply in [submit(made, ask) for ask in asks]]
        token_bytes = made.model(None).runner.token_bytes
    with engine(built("gemma3"), kv_memory=70 * token_bytes, max_batch_tokens=9) as made:
        cut = [reply.wait() for reply in [submit(made, ask) for ask in asks]]
        assert made.model(None).pool.capacity == 70
    for one, two in zip(roomy, cut, strict=True):
        assert one.tokens == two.tokens
        np.testing.assert_allclose(
            [r.logprob for r in one.prompt or []], [r.logprob for r in two.prompt or []], atol=LIMIT
        )
        np.testing.assert_allclose(
            [r.logprob for r in one.scores if r], [r.logprob for r in two.scores if r], atol=LIMIT
        )


@pytest.mark.parametrize("name", ["gemma3", "gpt2", "bloom"])
def test_nested_prompts_that_wait_together_are_answered_right(name: str) -> None:
    """Continuations of every prefix at once, with unrelated prompts, several of one prompt, and longer ones."""
    model, ids = built(name), tokens(30)
    lp = expected(model, ids)
    with engine(model) as made:
        steps = steps_of(made)
        blocker = hold(made)
        nested = [submit(made, Ask(ids[:n], 1, logprobs=5)) for n in range(1, 31)]
        scored = submit(made, Ask(ids[:20], 2, logprobs=0, prompt_logprobs=3))
        twice = [submit(made, Ask(ids[:9], 4, logprobs=0, temperature=1.0, seed=s)) for s in (1, 2)]
        other = submit(made, Ask(tokens(12, seed=9), 3, logprobs=1, prompt_logprobs=0))
        blocker.set()
        for n, reply in enumerate(nested, start=1):
            row = reply.wait().scores[0]
            assert row is not None and list(row.top_ids) == sorted(range(lp.shape[1]), key=lambda v: -lp[n - 1, v])[:5]
            np.testing.assert_allclose(row.top_logprobs, lp[n - 1, list(row.top_ids)], atol=LIMIT)
        for reply in (scored, other, *twice):
            check(model, reply)
        assert steps_of(made) - steps <= 8
        # the same in turn: sampling does not depend on the company
        for seed, reply in zip((1, 2), twice, strict=True):
            again = submit(made, Ask(ids[:9], 4, logprobs=0, temperature=1.0, seed=seed)).wait()
            assert again.tokens == reply.tokens


def check(model: Any, reply: Reply) -> None:
    """Every score of a reply against the model's own forward of its text."""
    reply.wait()
    text = (*reply.text, *reply.tokens)
    lp = expected(model, text)
    rows = [*((reply.prompt or []) if reply.prompt is not None else []), *reply.scores]
    first = len(text) - len(rows)
    for at, row in enumerate(rows, start=first):
        assert row is not None and row.token == text[at]
        assert row.logprob == pytest.approx(lp[at - 1, text[at]], abs=LIMIT)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_warm_prompt_request_gives_the_cold_ones_numbers(name: str) -> None:
    model, ids = built(name), tokens(40)
    with engine(model) as made:
        cold = submit(made, Ask(ids, 1, logprobs=6, prompt_logprobs=6)).wait()
    with engine(model) as made:
        submit(made, Ask(ids[:25], 0)).wait()  # keys and values without scores
        submit(made, Ask(ids[:12], 0, prompt_logprobs=2)).wait()  # scores, too few
        submit(made, Ask((*ids[:30], 5, 6), 0, prompt_logprobs=8)).wait()  # a split
        for k in (6, 6, 2, 0):
            warm = submit(made, Ask(ids, 1, logprobs=6, prompt_logprobs=k)).wait()
            for one, two in zip(cold.prompt or [], warm.prompt or [], strict=True):
                assert one.token == two.token and one.rank == two.rank and one.top_ids[:k] == two.top_ids
                assert one.logprob == pytest.approx(two.logprob, abs=LIMIT)
                np.testing.assert_allclose(one.top_logprobs[:k], two.top_logprobs, atol=LIMIT)
            assert warm.tokens == cold.tokens
        assert isinstance(warm.end, Finished) and warm.end.cached_tokens == len(ids) - 1
        steps = steps_of(made)
        complete = submit(made, Ask(ids, 0, prompt_logprobs=4)).wait()
        assert isinstance(complete.end, Finished) and complete.end.cached_tokens == len(ids)
        assert steps_of(made) == steps + 1  # a step without a forward: everything was there


def test_cancelling_a_lead_or_a_rider_leaves_the_others_alone() -> None:
    model, ids = built("llama"), tokens(30)
    for gone in (0, 3):
        with engine(model, max_batch_tokens=8) as made:
            blocker = hold(made)
            replies = [Reply() for _ in range(4)]
            sequences = [
                made.submit(
                    made.model(None),
                    Ask(ids[:n], 2, logprobs=0),
                    on_prompt=reply.on_prompt,
                    on_token=reply.on_token,
                    on_end=reply.on_end,
                )
                for n, reply in zip((30, 20, 25, 28), replies, strict=True)
            ]
            made.cancel(made.model(None), sequences[gone])
            blocker.set()
            for i, (n, reply) in enumerate(zip((30, 20, 25, 28), replies, strict=True)):
                if i != gone:
                    reply.text = ids[:n]
                    check(model, reply)
            assert replies[gone].end is None


def test_a_broken_pool_stops_the_engine_and_is_told() -> None:
    made = Engine([loaded(copy.deepcopy(built("llama")))], EngineConfig(kv_memory=1 << 22, check_idle=True))
    made.start()
    submit(made, Ask(tokens(9), 1)).wait()

    def lose() -> None:
        made.model(None).pool.take(1)  # nobody gives it back

    made.call(lose)
    reply = submit_late(made)
    assert isinstance(reply, ServeError) and "pages are held" in str(reply)
    made.stop()


def test_a_stopped_engine_refuses_jobs_and_a_job_that_cannot_be_told_ends_with_its_error() -> None:
    windows = [ScoreWindow(tokens(9), tuple(range(1, 9)))]
    got: list[Any] = []
    ready = threading.Event()

    def on_end(outcome: Any) -> None:
        got.append(outcome)
        ready.set()

    made = Engine([loaded(copy.deepcopy(built("llama")))], EngineConfig(kv_memory=1 << 22))
    job = ScoreJob(None, [made.model(None)], windows, 5, on_end)
    job.parts.append({"no such column": np.zeros(1)})  # what the columns are put together from
    made.start()
    made.enqueue(job)
    assert ready.wait(STUCK)
    assert isinstance(got[0], ServeError)
    made.stop()
    with pytest.raises(Draining):
        made.enqueue(ScoreJob(None, [made.model(None)], windows, 5, on_end))
    assert len(got) == 1


def submit_late(made: Engine) -> Finished | Exception | None:
    """The outcome of requests made until one fails."""
    for _ in range(200):
        try:
            reply = submit(made, Ask(tokens(9), 1))
        except ServeError as error:
            return error
        assert reply.done.wait(STUCK)
        if isinstance(reply.end, Exception):
            return reply.end
    return None


def test_scoring_and_requests_share_the_engine() -> None:
    ref, cand = built("llama"), perturbed(built("llama"))
    windows = [ScoreWindow(tokens(30, seed=i), tuple(range(1, 30))) for i in range(6)]
    with engine(ref, cand, names=("ref", "cand"), max_batch_tokens=64) as made:
        got: list[Any] = []
        ready = threading.Event()

        def on_end(columns: Any) -> None:
            got.append(columns)
            ready.set()

        made.score(made.model("ref"), [made.model("cand")], windows, overlap_k=5, on_end=on_end)
        reply = Reply()
        made.submit(
            made.model("cand"),
            Ask(tokens(20), 4),
            on_prompt=reply.on_prompt,
            on_token=reply.on_token,
            on_end=reply.on_end,
        )
        reply.wait()
        assert ready.wait(STUCK)
        assert len(got[0]["kl"]) == 6 * 29


def test_rows_that_ask_for_nothing_get_no_scores() -> None:
    with engine(built("llama")) as made:
        asking = submit(made, Ask(tokens(9), 3, logprobs=1))
        silent = submit(made, Ask(tokens(9, seed=1), 3))
        assert all(row is not None for row in asking.wait().scores)
        assert silent.wait().scores == [None] * 3
        assert silent.prompt is None


def test_what_cannot_be_answered_is_refused_before_any_compute() -> None:
    with engine(built("llama"), max_logprobs=5) as made:
        made_steps = made.steps
        for ask, field in (
            (Ask((), 1), "empty"),
            (Ask(tokens(120), 20), "context"),
            (Ask((1, 999), 1), "vocabulary"),
            (Ask((1, 2), 1, logprobs=6), "logprobs"),
            (Ask((1, 2), 1, logprobs=-1), "--max-logprobs -1"),
            (Ask((1, 2), 1, prompt_logprobs=6), "prompt_logprobs"),
        ):
            with pytest.raises(BadRequest, match=field):
                submit(made, ask)
        with pytest.raises(NotFound, match="tiny"):
            made.model("other")
        assert made.steps == made_steps


def test_a_cancelled_request_gives_its_pages_back() -> None:
    with engine(built("llama")) as made:
        reply = Reply()
        first = threading.Event()
        sequence = made.submit(
            made.model(None),
            Ask(tokens(20), 100),
            on_prompt=reply.on_prompt,
            on_token=lambda *_: first.set(),
            on_end=reply.on_end,
        )
        assert first.wait(STUCK)
        made.cancel(made.model(None), sequence)
        submit(made, Ask(tokens(5), 1)).wait()
        assert not made.model(None).scheduler.busy


def test_stopping_tells_what_is_unfinished() -> None:
    with engine(built("llama")) as made:
        replies = [submit(made, Ask(tokens(20, seed=i), 100)) for i in range(4)]
    for reply in replies:
        assert reply.done.wait(STUCK)
        assert isinstance(reply.end, (Draining, Finished))
