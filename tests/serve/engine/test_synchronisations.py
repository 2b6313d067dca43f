"""How often a step waits for its device, counted on a device that is not there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from serve.engine import reduce
from serve.engine.runtime import ModelRuntime
from serve.engine.sampling import choose, pick_together
from serve.engine.sequence import Ask, RowScores, Sequence
from serve.engine.transfer import Download, upload
from serve.engine.wanted import ranks_of
from tests.serve.architectures import built, runtime, tokens
from tests.serve.faraway import FarAway, FarTensor, send_away

SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 7},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.4, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 0.9, "repetition_penalty": 1.8, "top_p": 0.95},
    {"temperature": 1.0, "logit_bias": ((7, 4.0), (9, -3.0))},
    {"temperature": 1.0, "allowed_token_ids": (5, 9, 40, 41), "logit_bias": ((40, 1.0),)},
    {"temperature": 1.0, "stop_token_ids": frozenset({4, 11}), "min_tokens": 9},
    {"repetition_penalty": 1.3},
    {"allowed_token_ids": (5, 9, 40)},
]


class Told:
    """What one request was told."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.rows: list[RowScores] = []
        self.end: Any = None

    def sequence(self, ask: Ask) -> Sequence:
        def on_token(token: int, row: RowScores | None) -> None:
            self.tokens.append(token)
            self.rows += [row] if row else []

        return Sequence(ask, self.rows.extend, on_token, lambda end: setattr(self, "end", end))


def answers(model: ModelRuntime, asks: list[Ask], after: Callable[[], None] = lambda: None) -> list[Told]:
    told = [Told() for _ in asks]
    for one, ask in zip(told, asks, strict=True):
        model.scheduler.add(one.sequence(ask))
    while model.scheduler.busy:
        model.step()
        after()
    for one in told:
        if isinstance(one.end, Exception):
            raise one.end
    return told


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> FarAway:
    return FarAway(monkeypatch)


@pytest.fixture
def away(far: FarAway) -> ModelRuntime:
    """A model that was loaded and checked here and then sent away."""
    made = runtime(built("gemma3"), max_batch_tokens=64)
    with torch.inference_mode():
        send_away(made.loaded.model)
        made.runner._device = next(made.loaded.model.parameters()).device  # type: ignore[attr-defined]
        made.head._weight = FarTensor(made.head._weight)  # type: ignore[union-attr]
    return made


def asks() -> list[Ask]:
    """Every way to choose a token, and every kind of scores, some of them on prompts that share prefixes."""
    made = [Ask(tokens(9 + i, seed=i), 5, seed=i, **fields) for i, fields in enumerate(SAMPLED)]
    made += [Ask(tokens(11, seed=40 + i), 5, logprobs=k) for i, k in enumerate((None, 0, 5, 20))]
    made += [Ask(tokens(12, seed=50 + i), 4, logprobs=5, seed=i, **fields) for i, fields in enumerate(SAMPLED)]
    made += [Ask(tokens(30, seed=60), 3, logprobs=3, prompt_logprobs=k) for k in (0, 5, 20)]
    made += [Ask(tokens(70, seed=61)[:n], 1, logprobs=2) for n in (3, 20, 41, 70)]
    made += [Ask(tokens(14, seed=62), 3, logprobs=0, prompt_logprobs=1, wanted=(3, 8, 100, 99))]
    return made


def test_a_step_waits_once_for_the_device(far: FarAway, away: ModelRuntime) -> None:
    """Greedy, sampled, penalised, with logprobs, prompt logprobs and named ids, together and in chunks."""
    seen: list[tuple[dict[str, int], int]] = []

    def note() -> None:
        seen.append((dict(far.waits), far.bytes))
        far.waits.clear()
        far.bytes = 0

    with far:
        told = answers(away, asks(), note)
    idle = [n for n, (waits, _) in enumerate(seen) if not waits]
    assert [waits for waits, _ in seen if waits] == [{"a copy to the host": 1}] * (len(seen) - len(idle))
    assert len(seen) > 6 and len(idle) <= len(seen) // 2  # a step that only prefills asks for nothing
    assert all(told)


def test_what_leaves_the_device_is_as_many_values_as_were_asked_for(far: FarAway, away: ModelRuntime) -> None:
    """8 bytes a generated token, 16 a scored row, 8 an alternative: never a row of the vocabulary."""
    with far:
        answers(away, [Ask(tokens(9, seed=i), 1, logprobs=k) for i, k in enumerate((None, 0, 5, 20, 20))])
        assert far.bytes == 5 * 8 + 4 * 16 + 45 * 8
        far.bytes = 0
        answers(away, [Ask(tokens(20, seed=9), 0, prompt_logprobs=5)])
        assert far.bytes == 19 * 16 + 19 * 5 * 8
        far.bytes = 0
        answers(away, [Ask(tokens(9, seed=10), 1, seed=1, **fields) for fields in SAMPLED])
        assert far.bytes == len(SAMPLED) * 8


def test_answers_from_a_device_are_those_of_the_cpu(far: FarAway, away: ModelRuntime) -> None:
    here = answers(runtime(built("gemma3"), max_batch_tokens=64), asks())
    with far:
        there = answers(away, asks())
    for ours, theirs in zip(here, there, strict=True):
        assert ours.tokens == theirs.tokens
        assert [r[:1] + r[2:4] for r in ours.rows] == [r[:1] + r[2:4] for r in theirs.rows]
        for a, b in zip(ours.rows, theirs.rows, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
            assert a.top_logprobs == pytest.approx(b.top_logprobs, abs=1e-5)
            assert [(w.token, w.rank) for w in a.wanted] == [(w.token, w.rank) for w in b.wanted]


def test_lists_of_the_whole_vocabulary_come_in_parts(
    far: FarAway, away: ModelRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where answers pile up on the device, it is waited for more often rather than filled."""
    monkeypatch.setattr("serve.engine.rows._MOST_HELD", 20_000)
    away.rows_per_tile = 4
    asked = [Ask(tokens(20, seed=3), 1, logprobs=-1, prompt_logprobs=-1)]
    here = answers(runtime(built("gemma3")), asked)
    with far:
        there = answers(away, asked)
    assert set(far.waits) == {"a copy to the host"} and far.waits.total() > 2
    assert [row.top_ids for row in here[0].rows] == [row.top_ids for row in there[0].rows]


def test_a_row_without_a_finite_logit_ends_its_own_request(far: FarAway) -> None:
    """The others of its step have their tokens."""
    from serve.engine.rows import Row, StepRows

    logits = torch.randn(3, 50)
    logits[1] = torch.nan
    sequences = [Told().sequence(Ask((1, 2), 1, logprobs=k)) for k in (None, 2, 2)]
    rows = [Row(i, sequence, 2) for i, sequence in enumerate(sequences)]
    near, there = StepRows(), StepRows()
    near.add_tile(rows, [0, 1, 2], logits)
    with far:
        there.add_tile(rows, [0, 1, 2], FarTensor(logits))
        got = there.answers()
    for step in (near.answers(), got):
        assert [answer.failure is not None for answer in step] == [False, True, False]
        assert [step[i].token for i in (0, 2)] == [int(logits[0].argmax()), int(logits[2].argmax())]
        assert "position 2" in str(step[1].failure)


@pytest.mark.parametrize("fields", SAMPLED, ids=lambda f: "+".join(f))
def test_rows_drawn_together_are_those_drawn_alone(fields: dict[str, Any]) -> None:
    """The device's sampler against the CPU's, in any company: the same seed gives the same id."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(40, 300, generator=generator) * 3
    logits[7, 20:40] = logits[7, 20]  # equal ones
    sequences = []
    for i in range(40):
        made = Told().sequence(Ask(tokens(6, seed=i), 9, seed=i, **fields))
        made.tokens += tokens(i % 5, seed=100 + i)
        sequences.append(made)
    alone = [choose(sequence, row) for sequence, row in zip(sequences, logits, strict=True)]
    assert pick_together(logits, range(40), sequences).tokens.tolist() == alone
    some = [31, 4, 7, 22]
    assert pick_together(logits, some, [sequences[i] for i in some]).tokens.tolist() == [alone[i] for i in some]
    mixed = sequences[:20] + [Told().sequence(Ask((1,), 3)) for _ in range(20)]
    assert pick_together(logits, range(40), mixed).tokens.tolist()[:20] == alone[:20]


def test_draws_of_a_device_follow_the_weights() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0, -torch.inf]])
    drawn = [
        int(pick_together(logits, [0], [Told().sequence(Ask((1,), 1, temperature=1.0, seed=s))]).tokens)
        for s in range(3000)
    ]
    want = torch.softmax(logits[0], 0).numpy()
    got = np.bincount(drawn, minlength=4) / len(drawn)
    assert got[3] == 0 and np.all(np.abs(got - want) < 4.5 * np.sqrt(want * (1 - want) / len(drawn)) + 1e-9)


@pytest.mark.parametrize("k", [1, 3, 20, 60])
def test_lists_made_without_looking_are_in_the_one_order(k: int) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randint(-3, 3, (7, 60), generator=generator).float()
    logits[1, ::2], logits[2, 5], logits[3, 1::3] = -0.0, torch.inf, -torch.inf
    got, expected = reduce.keyed_top_k(logits, k), reduce.torch_top_k(logits, k)
    assert torch.equal(got.ids, expected.ids) and torch.equal(got.values, expected.values)
    logits[4, 9] = -torch.tensor(torch.nan)
    assert reduce.keyed_top_k(logits, k).values[4, 0].isnan()


def test_ranks_and_named_ids_are_counted_without_looking(far: FarAway) -> None:
    logits = torch.randint(0, 9, (6, 700), generator=torch.Generator().manual_seed(3)).float()
    chosen = torch.tensor([0, 5, 600, 699, 30, 31])
    top = reduce.top_k(logits, 4)
    expected, every = reduce.ranks(logits, chosen, top), ranks_of(logits[2], torch.arange(700))
    with far:
        there = FarTensor(logits)
        got = reduce.ranks(there, FarTensor(chosen), reduce.TopK(*map(FarTensor, top)))
        few, many = ranks_of(there[2], FarTensor(torch.arange(40))), ranks_of(there[2], FarTensor(torch.arange(700)))
    assert not far.waits
    assert torch.equal(got.near, expected)
    assert torch.equal(few.near, every[:40]) and torch.equal(many.near, every)


def test_arrays_travel_as_they_are(far: FarAway) -> None:
    arrays = [np.arange(3), np.array([True]), np.empty((0, 2), np.float32), np.arange(5, dtype=np.float32)[None]]
    with far:
        there = upload(torch.device("cuda"), *arrays)
        assert not far.waits
        download = Download()
        places = [download.add(tensor) for tensor in there]
        assert download.bytes == sum(array.nbytes for array in arrays)
        back = download.fetch()
    assert far.waits == {"a copy to the host": 1} and far.bytes == sum(array.nbytes for array in arrays)
    for place, array in zip(places, arrays, strict=True):
        assert back[place].dtype == array.dtype and back[place].shape == array.shape
        assert (back[place] == array).all()
    assert not download.fetch() and download.bytes == 0


def test_the_count_sees_what_waits(far: FarAway) -> None:
    """The test of the test: every way to wait for a device is noticed."""
    with far:
        there = FarTensor(torch.arange(4.0))
        for wait in (
            lambda: float(there[0]),
            lambda: there.cpu(),
            lambda: there[there > 1],
            lambda: torch.nonzero(there),
            lambda: bool((there > 1).any()),
            lambda: torch.zeros(4).copy_(there),
            lambda: torch.zeros(4).to(there.device),
        ):
            before = far.waits.total()
            wait()
            assert far.waits.total() > before
        with pytest.raises(NotImplementedError):
            torch.tensor([1, 2], device=there.device)
        before = far.waits.total()
        torch.arange(3, device=there.device) + copy.copy(there).sum().long()
        assert far.waits.total() == before
