"""The golden gate: the demo model on the engine against a stored reference, in every way a request can meet it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

from serve.config import EngineConfig, ModelSpec
from serve.engine.loop import Engine
from serve.engine.sequence import Ask, RowScores
from serve.models.load import load_models
from tests.serve import golden
from tests.serve.engine.test_loop import submit


class Replay(NamedTuple):
    """One way to meet the engine, and what float32 kernels of other shapes were measured to leave (nats)."""

    batch: int
    cached: bool  # keys and values of the prompts are cached before
    budget: int  # tokens of a step
    mean: float
    p99: float


REPLAYS = (
    Replay(1, False, 4096, 9.2e-7, 1.2e-5),
    Replay(9, False, 4096, 5.1e-7, 8.2e-6),
    Replay(9, True, 4096, 1.0e-6, 1.1e-5),
    Replay(5, False, 7, 3.8e-6, 2.7e-5),
    Replay(5, True, 4096, 1.1e-6, 1.2e-5),
)


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    config = EngineConfig(device="cpu", max_logprobs=golden.K, check_idle=True)
    made = Engine(load_models([ModelSpec("demo")], device="cpu"), config)
    made.start()
    yield made
    made.stop()
    made.check_integrity()


@pytest.mark.demo
def test_replays_agree_with_the_stored_reference(demo: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    stored = golden.read()
    assert len(stored.tokens) == golden.SEQUENCES
    for batch, cached, budget, floor_mean, floor_p99 in REPLAYS:
        start_anew(demo, budget=budget)
        rows = list(replay(demo, stored.tokens, batch=batch, cached=cached))
        assert len(rows) == len(stored.actual)
        deltas, regret = [], 0.0
        for row, ids, logprobs, actual in zip(rows, stored.ids, stored.logprobs, stored.actual, strict=True):
            reference = dict(zip(ids.tolist(), logprobs.tolist(), strict=True))
            both = [(lp, reference[t]) for t, lp in zip(row.top_ids, row.top_logprobs, strict=True) if t in reference]
            assert len(both) >= golden.K - 2  # ids at the end of the list may trade places
            deltas.extend(abs(a - b) for a, b in both)
            deltas.append(abs(row.logprob - float(actual)))
            regret = max(regret, logprobs[0] - reference[row.top_ids[0]])
        mean, p99 = float(np.mean(deltas)), float(np.percentile(deltas, 99))
        with capsys.disabled():
            name = f"batches of {batch}, {'cached' if cached else 'cold'}, {budget} tokens a step"
            print(f"\ngolden: {name}: |delta logprob| mean {mean:.2g}, p99 {p99:.2g}, regret {regret:.2g} nats")
        assert mean <= 2 * floor_mean and p99 <= 2 * floor_p99
        assert regret <= 2 * floor_p99  # a tie: the two are as near as rounding


def start_anew(made: Engine, *, budget: int) -> None:
    """Empty the prefix cache, and set the tokens of a step."""
    done = threading.Event()

    def clear() -> None:
        scheduler = made.model(None).scheduler
        scheduler.cache.clear()
        scheduler.limits = dataclasses.replace(scheduler.limits, tokens=budget)
        done.set()

    made.call(clear)
    assert done.wait(60)


def replay(made: Engine, runs: list[tuple[int, ...]], *, batch: int, cached: bool) -> Iterator[RowScores]:
    """Score every sequence, `batch` at a time; rows in the reference's order."""
    if cached:
        for reply in [submit(made, Ask(run, 0)) for run in runs]:
            reply.wait()
    for low in range(0, len(runs), batch):
        asks = [Ask(run, 0, prompt_logprobs=golden.K) for run in runs[low : low + batch]]
        for reply in [submit(made, ask) for ask in asks]:
            yield from reply.wait().prompt or []
