"""The sampler against an independent float64 computation in numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.engine.sampling import choose, kept, uniform
from serve.engine.sequence import Ask, Sequence
from serve.errors import ScoringFailed


def sequence(generated: tuple[int, ...] = (), prompt: tuple[int, ...] = (1, 2), **fields: Any) -> Sequence:
    ask = Ask(prompt=prompt, max_tokens=8, **fields)
    made = Sequence(ask, lambda rows: None, lambda token, row: None, lambda end: None)
    made.tokens += generated
    return made


def distribution(logits: np.ndarray, ask: Ask, generated: tuple[int, ...]) -> np.ndarray:
    """The probabilities that one draw follows, slowly, one id at a time."""
    x = logits.astype(np.float64).copy()
    for i in range(len(x)):
        if i in ask.prompt or i in generated:
            x[i] = x[i] / ask.repetition_penalty if x[i] > 0 else x[i] * ask.repetition_penalty
        count = generated.count(i)
        x[i] -= ask.frequency_penalty * count + (ask.presence_penalty if count else 0.0)
        x[i] += dict(ask.logit_bias).get(i, 0.0)
        if ask.allowed_token_ids and i not in ask.allowed_token_ids:
            x[i] = -math.inf
        if i in ask.stop_token_ids and len(generated) < ask.min_tokens:
            x[i] = -math.inf
    p = np.exp((x - x.max()) / ask.temperature)
    order = sorted(range(len(p)), key=lambda i: (-x[i], i))
    keep = [i for i in order if p[i] >= ask.min_p] or order[:1]
    if ask.top_k:
        keep = keep[: ask.top_k]
    total, mass, cut = sum(p[i] for i in keep), 0.0, []
    for i in keep:
        cut.append(i)
        mass += p[i]
        if mass >= ask.top_p * total:
            break
    out = np.zeros_like(p)
    out[cut] = p[cut]
    return out / out.sum()


def drawn(logits: np.ndarray, draws: int, generated: tuple[int, ...] = (), **fields: Any) -> np.ndarray:
    counts = np.zeros(len(logits))
    tensor = torch.tensor(logits, dtype=torch.float32)
    for seed in range(draws):
        counts[choose(sequence(generated, seed=seed, **fields), tensor)] += 1
    return counts / draws


CASES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 2.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.7, "min_p": 0.2},
    {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 1.0, "repetition_penalty": 1.8},
    {"temperature": 1.0, "logit_bias": ((0, 2.0), (3, -2.0)), "allowed_token_ids": (0, 3, 5)},
    {"temperature": 1.0, "stop_token_ids": frozenset({4, 0}), "min_tokens": 5},
]


@pytest.mark.parametrize("fields", CASES, ids=lambda f: "+".join(f))
def test_draws_follow_the_distribution(fields: dict[str, Any]) -> None:
    logits = np.random.default_rng(0).normal(0, 1.5, 8)
    generated = (5, 5, 7)
    want = distribution(logits, sequence(**fields).ask, generated)
    draws = 4000
    got = drawn(logits, draws, generated, **fields)
    assert set(np.flatnonzero(got)) <= set(np.flatnonzero(want))
    assert np.all(np.abs(got - want) < 4.5 * np.sqrt(want * (1 - want) / draws) + 1e-9)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(-6, 6), min_size=1, max_size=12),
    st.floats(0.05, 5),
    st.floats(0.05, 1),
    st.integers(0, 14),
    st.floats(0, 1),
)
def test_what_is_kept(values: list[int], temperature: float, top_p: float, top_k: int, min_p: float) -> None:
    ask = sequence(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p).ask
    logits = np.array(values, dtype=np.float64) / 2
    ids, weights = kept(torch.tensor(logits, dtype=torch.float32), ask)
    want = distribution(logits, ask, ())
    got = np.zeros(len(values))
    got[ids.numpy()] = (weights / weights.sum()).numpy()
    if not np.allclose(got, want, atol=1e-9):  # a cut exactly at a rounding edge may take one id more or less
        assert abs(int((got > 0).sum()) - int((want > 0).sum())) == 1


def test_nothing_asked_copies_nothing_and_the_logits_stay() -> None:
    logits = torch.tensor([0.5, 2.0, 2.0, -1.0])
    before = logits.clone()
    assert choose(sequence(), logits) == 1  # the smaller id of equals
    choose(sequence(temperature=1.0, repetition_penalty=2.0, logit_bias=((0, 5.0),), seed=1), logits)
    assert torch.equal(logits, before)


def test_greedy_sees_penalties_and_masks() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert choose(sequence((3,), frequency_penalty=1.5), logits) == 2
    assert choose(sequence(allowed_token_ids=(0, 1)), logits) == 1
    assert choose(sequence(stop_token_ids=frozenset({3}), min_tokens=1), logits) == 2
    assert choose(sequence((0,), stop_token_ids=frozenset({3}), min_tokens=1), logits) == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_finite_logit_is_an_error(bad: float) -> None:
    with pytest.raises(ScoringFailed, match="position 2"):
        choose(sequence(), torch.full((4,), bad))


def test_uniform_is_of_seed_and_step_alone() -> None:
    values = [uniform(seed, step) for seed in range(40) for step in range(50)]
    assert values == [uniform(seed, step) for seed in range(40) for step in range(50)]
    assert len(set(values)) == len(values) and min(values) >= 0 and max(values) < 1
    assert abs(np.mean(values) - 0.5) < 0.03 and abs(np.var(values) - 1 / 12) < 0.01
    assert len({uniform(None, 0) for _ in range(20)}) == 20


def test_extreme_temperatures() -> None:
    logits = torch.tensor([1.0, 1.1, -50.0])
    assert {choose(sequence(temperature=1e-300, seed=s), logits) for s in range(20)} == {1}
    assert {choose(sequence(temperature=100.0, seed=s), logits) for s in range(60)} == {0, 1, 2}
