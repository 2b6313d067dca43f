"""--deterministic: one request's numbers, bit for bit, in any company, order, chunking and state of the cache."""

from __future__ import annotations

import copy
import random
import threading
from typing import Any

import pytest
import torch

from serve.config import EngineConfig
from serve.engine.loop import Engine
from serve.engine.pair import ScoreJob, ScoreWindow
from serve.engine.sequence import Ask, Finished, RowScores
from serve.engine.tiled import TILE_ROWS, WIDE, TiledRunner
from serve.errors import LoadFailed
from tests.serve.architectures import PADDED, built, loaded, own_logits, perturbed, runtime, tokens
from tests.serve.engine.test_loop import Reply, engine, submit
from tests.stuck import STUCK

pytestmark = pytest.mark.slow

DENSE = ("llama", "qwen3", "gemma3", "gpt2", "phi3", "mistral", "gemma2", "gpt_neox", "opt", "cohere", "granite")
Answer = tuple[list[RowScores] | None, list[int], list[RowScores | None]]


def answer(reply: Reply) -> Answer:
    done = reply.wait()
    assert isinstance(done.end, Finished)
    return done.prompt, done.tokens, done.scores


def asks() -> list[Ask]:
    """Prompts that share prefixes, nested ones, different k, sampled and greedy."""
    text, other = tokens(40, seed=1), tokens(40, seed=2)
    made = [Ask(text[:n], 1, logprobs=3) for n in (1, 2, 3, 17, 40)]
    made += [Ask(text[:n], 0, prompt_logprobs=k) for n, k in ((12, 0), (31, 5), (40, 2))]
    made += [Ask((*text[:20], *other[:n]), 2, logprobs=1, prompt_logprobs=1) for n in (1, 9)]
    made += [Ask(other[:n], 4, logprobs=4, temperature=1.0, seed=n) for n in (5, 33)]
    made += [Ask(tokens(7 * i, seed=90 + i), i, logprobs=2) for i in range(1, 4)]
    return made


@pytest.mark.parametrize("name", DENSE)
def test_it_agrees_with_the_models_own_forward(name: str) -> None:
    """Sliding windows, soft-capping, grouped heads, learned positions: the tiled attention is the model's."""
    ids = tokens(90)
    lp = torch.log_softmax(own_logits(built(name), ids), dim=-1)
    with engine(built(name), deterministic=True) as made:
        assert made.model(None).backend == "tiled"
        rows = submit(made, Ask(ids, 0, prompt_logprobs=3)).wait().prompt or []
    for at, row in enumerate(rows):
        assert row.logprob == pytest.approx(float(lp[at, row.token]), abs=1e-5)
        assert list(row.top_ids) == lp[at].topk(3).indices.tolist()


@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_a_hundred_shuffled_mixes_are_bit_identical(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mix: some of the requests in a random order at once, over whatever the last ones left cached."""
    monkeypatch.setattr("serve.engine.tiled.KEY_BLOCK", 16)  # several blocks of keys in short prompts
    rng, every, mixes = random.Random(5), asks(), 0
    with engine(built(name), deterministic=True) as made:
        token_bytes = made.model(None).runner.token_bytes
        alone = []
        for ask in every:
            alone.append(answer(submit(made, ask)))
            clear(made)
    # budgets and pools: roomy, chunked, so small that prefixes are evicted and sequences preempted
    for budget, pages, times in ((4096, 2000, 60), (13, 2000, 20), (40, 70, 20)):
        with engine(built(name), deterministic=True, max_batch_tokens=budget, kv_memory=pages * token_bytes) as made:
            for _ in range(times):
                replies = [(i, submit(made, every[i])) for i in rng.sample(range(len(every)), rng.randrange(2, 8))]
                for i, reply in replies:
                    assert answer(reply) == alone[i], (name, budget, i)
                if rng.random() < 0.15:
                    clear(made)
                mixes += 1
    assert mixes == 100  # of 200 over both models


def clear(made: Engine) -> None:
    """Empty the prefix cache between two steps."""
    done = threading.Event()

    def run() -> None:
        made.model(None).scheduler.cache.clear()
        done.set()

    made.call(run)
    assert done.wait(STUCK)


def test_a_smaller_k_and_fewer_neighbours_change_no_bit() -> None:
    ids = tokens(50)
    rows = []
    for k in (0, 1, 7, -1):
        with engine(built("llama"), deterministic=True) as made:
            rows.append([r.logprob for r in submit(made, Ask(ids, 0, prompt_logprobs=k)).wait().prompt or []])
    assert all(other == rows[0] for other in rows)


def test_pair_scoring_is_bit_identical_alone_in_batches_and_in_chunks() -> None:
    ref, cand = built("gemma3"), perturbed(built("gemma3"))
    windows = [ScoreWindow(tokens(n, seed=n), tuple(range(1, n, 2))) for n in (40, 2, 23, 70, 5)]

    def columns(parts: list[list[ScoreWindow]], **sizes: Any) -> dict[str, list[float]]:
        models = [runtime(m, n, deterministic=True, **sizes) for m, n in ((ref, "ref"), (cand, "cand"))]
        got: dict[str, list[float]] = {}
        for part in parts:
            job = ScoreJob(models[0], [models[1]], part, 10, on_end=lambda _: None)
            while not job.finished:
                job.advance()
            for name, values in job.columns().items():
                got.setdefault(name, []).extend(values.tolist())
        del got["window"]
        return got

    together = columns([windows])
    assert together == columns([[w] for w in windows])
    assert together == columns([windows], max_batch_tokens=9)
    assert max(together["kl"]) > 1e-4


def test_pair_scoring_and_prompt_logprobs_give_the_same_number() -> None:
    ids = tokens(50)
    model = runtime(built("llama"), "m", deterministic=True)
    job = ScoreJob(None, [model], [ScoreWindow(ids, tuple(range(1, 50)))], 10, on_end=lambda _: None)
    job.advance()
    with engine(built("llama"), deterministic=True) as made:
        rows = submit(made, Ask(ids, 0, prompt_logprobs=0)).wait().prompt or []
    expected = torch.tensor([-row.logprob for row in rows], dtype=torch.float64).float().tolist()
    assert job.columns()["cand_nll"].tolist() == expected


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", *PADDED])
def test_where_it_cannot_be_kept_it_is_refused_by_name(name: str) -> None:
    with pytest.raises(LoadFailed, match=r"--deterministic cannot be kept for tiny: .+"):
        Engine([loaded(copy.deepcopy(built(name)))], EngineConfig(deterministic=True))


@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_tiles_side_by_side_give_the_bits_of_one_at_a_time(name: str) -> None:
    ids, wide = tokens(110, seed=4), []
    for side_by_side in (True, False):
        with engine(built(name), deterministic=True) as made:
            runner = made.model(None).runner
            assert isinstance(runner, TiledRunner) and runner.wide == WIDE and made.model(None).backend == "tiled"
            runner.wide = WIDE if side_by_side else 1
            wide.append(submit(made, Ask(ids, 2, logprobs=2, prompt_logprobs=2)).wait())
    assert answer(wide[0]) == answer(wide[1])


class Crowded(torch.nn.Module):
    """A layer with other bits once its input is longer than a tile, which no product of its own explains."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (1 + 1e-6 * (x.shape[1] > TILE_ROWS))


def test_where_tiles_disturb_each_other_they_run_one_at_a_time() -> None:
    model = copy.deepcopy(built("llama"))
    model.model.layers[1].mlp = Crowded(model.model.layers[1].mlp)
    with engine(model, deterministic=True) as made:
        assert made.model(None).backend.startswith("tiled (one tile at a time")
        assert made.model(None).runner.wide == 1  # type: ignore[attr-defined]


class NeighbourlyHead(torch.nn.Module):
    """A layer whose rows look at each other: an activation scale over the whole batch."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().max() / 2**20
        return self.inner((x / scale).round() * scale)


def test_a_layer_whose_rows_depend_on_each_other_is_found_at_load() -> None:
    model = copy.deepcopy(built("llama"))
    model.model.layers[1].mlp.down_proj = NeighbourlyHead(model.model.layers[1].mlp.down_proj)
    with pytest.raises(LoadFailed, match="change with the place of a row"):
        Engine([loaded(model)], EngineConfig(deterministic=True))


def test_sinks_are_a_key_without_a_value() -> None:
    """GPT-OSS's sinks, which no dense architecture here has, against the eager formula."""
    from serve.engine.interface import Shape
    from serve.engine.runner import Segment
    from serve.engine.tiled import Slot, Tiles, _attend

    torch.manual_seed(0)
    heads, kv_heads, size, n = 4, 2, 16, 6
    q, sinks = torch.randn(heads, TILE_ROWS, size), torch.randn(heads)
    keys, values = torch.randn(n + 1, kv_heads, size), torch.randn(n + 1, kv_heads, size)
    tile = Tiles()
    tile.begin([Slot(0, 4, 2, Segment(0, 4, 2, tuple(range(n)), stored=True))], q.device)
    shape = Shape(scaling=0.25, window=3, softcap=None, sinks=sinks)
    (blocks,) = tile.blocks(3, n, q.device)
    got = _attend(q, keys, values, blocks, shape)
    for row in range(4):
        seen = slice(max(0, 2 + row - 2), 2 + row + 1)
        for head in range(heads):
            logits = torch.cat([keys[seen, head // 2] @ q[head, row] * 0.25, sinks[head : head + 1]])
            weights = torch.softmax(logits.double(), 0)[:-1].float()
            torch.testing.assert_close(got[row, head], weights @ values[seen, head // 2], atol=1e-5, rtol=1e-5)
