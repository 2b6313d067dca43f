"""The golden gate: the demo model on the engine against a stored reference, in every way a request can meet it.

No limit here was measured on some machine. The stored reference is float64. What float32 costs is measured in the run,
by the model's own forwards in several shapes, and the engine has to be as near; those forwards in turn have to be as
near as float32 allows anywhere.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from serve.config import EngineConfig, ModelSpec
from serve.engine.loop import Engine
from serve.engine.packed import PackedRunner
from serve.engine.sequence import Ask, RowScores
from serve.models.load import LoadedModel, load_models
from tests.serve import golden
from tests.serve.engine.test_loop import submit
from tests.stuck import STUCK


class Replay(NamedTuple):
    """One way to meet the engine."""

    batch: int
    cached: bool = False  # keys and values of the prompts are cached before
    budget: int = 4096  # tokens of a step

    def __str__(self) -> str:
        return f"batches of {self.batch}, {'cached' if self.cached else 'cold'}, {self.budget} tokens a step"


PACKED = (Replay(1), Replay(9), Replay(9, cached=True), Replay(5, budget=7), Replay(5, cached=True))
PADDED = (Replay(9),)


class Distance(NamedTuple):
    """|logprob - stored logprob| in nats."""

    mean: float
    p99: float

    def __str__(self) -> str:
        return f"|delta logprob| mean {self.mean:.2g}, p99 {self.p99:.2g} nats"


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    """The demo model as it is loaded; an engine takes its attention over for good."""
    (loaded,) = load_models([ModelSpec("demo")], device="cpu")
    return loaded


@contextmanager
def engine(loaded: LoadedModel, kind: str) -> Iterator[Engine]:
    made = Engine([loaded], EngineConfig(device="cpu", max_logprobs=golden.K, check_idle=True))
    assert made.model(None).backend.startswith(kind)
    made.start()
    yield made
    made.stop()
    made.check_integrity()


@pytest.mark.demo
def test_replays_agree_with_the_stored_reference(
    demo: LoadedModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = part_of(golden.read())
    lines: list[str] = []

    floors = []
    for batch, stride, threads in ((1, 3, 1), (4, 3, 1), (16, 1, 2)):
        with torch_threads(threads):
            floors.append(distance(stored, own_rows(demo.model, stored, batch=batch, stride=stride)))
        lines.append(f"the model's own forward, batches of {batch}, {threads} threads: {floors[-1]}")
    floor = Distance(max(f.mean for f in floors), max(f.p99 for f in floors))
    anywhere = float32_anywhere(demo)
    lines.append(f"float32 allows {anywhere:.2g} nats anywhere")
    assert floor.p99 <= anywhere, lines

    def check(made: Engine, replay: Replay) -> None:
        start_anew(made, budget=replay.budget)
        rows = list(answers(made, stored.tokens, replay))
        assert len(rows) == len(stored.actual)
        found = distance(stored, enumerate(rows))
        regret = max(lost(stored, at, row) for at, row in enumerate(rows))
        lines.append(f"{made.model(None).backend.split()[0]}, {replay}: {found}, regret {regret:.2g}")
        assert found.mean <= 2 * floor.mean and found.p99 <= 2 * floor.p99, lines
        assert regret <= anywhere, lines  # a tie: the two are as near as rounding

    with monkeypatch.context() as patch:
        patch.setattr(PackedRunner, "__init__", not_here)
        with engine(demo, "padded") as made:
            for replay in PADDED:
                check(made, replay)
    with engine(demo, "packed") as made:
        for replay in PACKED:
            check(made, replay)
    with capsys.disabled():
        print("", *(f"golden: {line}" for line in lines), sep="\n")


def part_of(stored: golden.Golden) -> golden.Golden:
    """Every other six of the stored sequences: only those of the same six share anything, and half of them will do."""
    assert len(stored.tokens) == golden.SEQUENCES
    rows = np.split(np.arange(len(stored.actual)), np.cumsum([len(run) - 1 for run in stored.tokens])[:-1])
    which = [i for i in range(golden.SEQUENCES) if i // 6 % 2]
    kept = np.concatenate([rows[i] for i in which])
    return golden.Golden(
        [stored.tokens[i] for i in which], stored.ids[kept], stored.logprobs[kept], stored.actual[kept]
    )


def not_here(self: PackedRunner, loaded: LoadedModel) -> None:
    """A packed runner that does not run this model, so that the engine takes the padded one."""
    raise RuntimeError("kept from running packed")


def float32_anywhere(loaded: LoadedModel) -> float:
    """Nats that float32 may move a log-probability on any machine, by any order of its sums.

    A sum of n products rounds by about sqrt(n) eps of its size; the layers add such errors up at random too. The logits
    whose size counts here are within a few dozen nats. bfloat16 would be 65,000 times as far.
    """
    config = loaded.model.config.get_text_config()
    sums = config.num_hidden_layers * (config.hidden_size + config.intermediate_size)
    return 32 * math.sqrt(sums) * float(np.finfo(np.float32).eps)


def distance(stored: golden.Golden, rows: Iterable[tuple[int, RowScores]]) -> Distance:
    """How far rows, each with its place in the reference, are from it."""
    deltas: list[float] = []
    for at, row in rows:
        reference = dict(zip(stored.ids[at].tolist(), stored.logprobs[at].tolist(), strict=True))
        both = [(lp, reference[t]) for t, lp in zip(row.top_ids, row.top_logprobs, strict=True) if t in reference]
        assert len(both) >= golden.K - 2  # ids at the end of the list may trade places
        deltas.extend(abs(a - b) for a, b in both)
        deltas.append(abs(row.logprob - float(stored.actual[at])))
    return Distance(float(np.mean(deltas)), float(np.percentile(deltas, 99)))


def lost(stored: golden.Golden, at: int, row: RowScores) -> float:
    """Nats that the row's likeliest id is below the reference's, in the reference."""
    (place,) = np.flatnonzero(stored.ids[at] == row.top_ids[0])
    return float(stored.logprobs[at][0] - stored.logprobs[at][place])


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Kernels on `count` threads; a machine with fewer cores runs them in turn."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def own_rows(model: Any, stored: golden.Golden, *, batch: int, stride: int) -> Iterator[tuple[int, RowScores]]:
    """Rows of the model's own forward of every stride-th sequence, each with its place in the reference."""
    ends = np.cumsum([len(run) - 1 for run in stored.tokens])
    which = range(0, len(stored.tokens), stride)
    for low in range(0, len(which), batch):
        part = which[low : low + batch]
        for i, logits in zip(part, golden.padded(model, [stored.tokens[i] for i in part]), strict=True):
            run, lp = stored.tokens[i], torch.log_softmax(logits.double(), dim=-1)
            for row, token in enumerate(run[1:]):
                top = lp[row].topk(golden.K)
                ids, values = tuple(top.indices.tolist()), tuple(top.values.tolist())
                yield int(ends[i]) - len(run) + 1 + row, RowScores(token, float(lp[row, token]), 0, ids, values)


def start_anew(made: Engine, *, budget: int) -> None:
    """Empty the prefix cache, and set the tokens of a step."""
    done = threading.Event()

    def clear() -> None:
        scheduler = made.model(None).scheduler
        scheduler.cache.clear()
        scheduler.limits = dataclasses.replace(scheduler.limits, tokens=budget)
        done.set()

    made.call(clear)
    assert done.wait(STUCK)


def answers(made: Engine, runs: list[tuple[int, ...]], replay: Replay) -> Iterator[RowScores]:
    """Score every sequence, a batch at a time; rows in the reference's order."""
    if replay.cached:
        for reply in [submit(made, Ask(run, 0)) for run in runs]:
            reply.wait()
    for low in range(0, len(runs), replay.batch):
        asks = [Ask(run, 0, prompt_logprobs=golden.K) for run in runs[low : low + replay.batch]]
        for reply in [submit(made, ask) for ask in asks]:
            yield from reply.wait().prompt or []
