"""The engine on each device there is against float64: a CUDA device where there is one, and always the CPU."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from serve.config import EngineConfig
from serve.engine.reduce import ahead, ahead_in_row, top_k
from serve.engine.runtime import ModelRuntime
from serve.engine.sampling import choose
from serve.engine.sequence import Ask, Sequence
from serve.engine.wanted import ranks_of
from tests.serve.architectures import SIX, built, loaded, perturbed
from tests.serve.engine.test_pair import WINDOWS, brute_force, score

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


def on(device: str, model: Any, name: str) -> ModelRuntime:
    return ModelRuntime(loaded(copy.deepcopy(model).to(device), name), EngineConfig(device=device), kv_memory=1 << 22)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SIX)
def test_pair_scores_are_those_of_float64(device: str, name: str) -> None:
    ref, cand = built(name), perturbed(built(name))
    got = score(on(device, ref, "ref"), [on(device, cand, "cand")])
    for column, values in brute_force(ref, cand, WINDOWS).items():
        np.testing.assert_allclose(got[column], values, atol=1e-4, rtol=1e-4, err_msg=f"{name}: {column}")


@pytest.mark.parametrize("device", DEVICES)
def test_equal_logits_go_by_id(device: str) -> None:
    """The greedy choice, the top-k list and ranks have one order, on every device."""
    row = torch.randint(0, 4, (500,), generator=torch.Generator().manual_seed(1)).float()
    order = sorted(range(500), key=lambda token: (-float(row[token]), token))
    here = row.to(device)
    assert choose(sequence(), here) == order[0]
    assert top_k(here[None], 20).ids[0].tolist() == order[:20]
    tokens = [order[0], order[7], order[250], order[-1]]
    places = [order.index(token) for token in tokens]
    assert [ahead_in_row(here, token) for token in tokens] == places
    assert ahead(here.expand(4, -1), torch.tensor(tokens, device=device)).tolist() == places
    assert ranks_of(here, torch.tensor(tokens, device=device)).tolist() == [place + 1 for place in places]


def sequence() -> Sequence:
    return Sequence(
        Ask((5,), 1, temperature=0), on_prompt=lambda _: None, on_token=lambda *_: False, on_end=lambda _: None
    )
