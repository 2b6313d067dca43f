"""Models whose numbers depend on the length of the whole forward, on both sides of the switch, against their own."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as t

from serve.config import EngineConfig
from serve.engine.lengths import Lengths
from serve.engine.loop import Engine
from serve.engine.pair import ScoreWindow
from serve.engine.sequence import Ask, Finished, RowScores
from tests.serve.architectures import _SIZES, _small, loaded, tokens

SWITCH = 64
LIMIT = 1e-5
SHORT, LONG = [1.0] * 4, [4.0, 8.0, 16.0, 32.0]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": SWITCH,
}
SCALED = {"rope_theta": 10000.0, "factor": 4.0}
BUILDERS = {
    "phi3": lambda: _small(t.Phi3Config(**_SIZES, original_max_position_embeddings=SWITCH, rope_parameters=LONGROPE)),
    "llama": lambda: _small(t.LlamaConfig(**_SIZES, rope_parameters=LONGROPE)),
    "phimoe": lambda: _small(
        t.PhimoeConfig(
            **_SIZES | {"initializer_range": 0.15},
            num_local_experts=4,
            num_experts_per_tok=2,
            original_max_position_embeddings=SWITCH,
            rope_parameters=LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.4},
        )
    ),
    "gemma3": lambda: _small(
        t.Gemma3TextConfig(
            **_SIZES,
            head_dim=8,
            sliding_window=9,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            query_pre_attn_scalar=16,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": LONGROPE,
            },
        )
    ),
    "dynamic": lambda: _small(
        t.LlamaConfig(**_SIZES | {"max_position_embeddings": SWITCH}, rope_parameters=SCALED | {"rope_type": "dynamic"})
    ),
    "yarn": lambda: _small(
        t.LlamaConfig(
            **_SIZES,
            rope_parameters=SCALED | {"rope_type": "yarn", "original_max_position_embeddings": SWITCH},
        )
    ),
}
REGIMES = {"phi3": 2, "llama": 2, "phimoe": 2, "gemma3": 2, "dynamic": 65, "yarn": 1}


def engine_of(model: Any, **sizes: Any) -> Engine:
    ready = replace(loaded(copy.deepcopy(model)), context_length=128)  # dynamic scaling begins beyond its own context
    made = Engine([ready], EngineConfig(**{"max_logprobs": -1, "kv_memory": 1 << 22, "check_idle": True, **sizes}))
    made.start()
    return made


def own_logprobs(model: Any, ids: tuple[int, ...]) -> torch.Tensor:
    """[len(ids), vocabulary] of a model that has never seen another sequence: dynamic scaling remembers the longest."""
    with torch.inference_mode():
        logits = copy.deepcopy(model)(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return torch.log_softmax(logits.double(), -1)


class Reply:
    def __init__(self, ids: tuple[int, ...]) -> None:
        self.ids, self.prompt, self.generated = ids, list[RowScores](), list[RowScores]()
        self.done = threading.Event()
        self.end: Any = None

    def on_end(self, end: Any) -> None:
        self.end = end
        self.done.set()

    def check(self, model: Any) -> None:
        """Prompt scores against the prompt's own forward, each new token against that of all before it."""
        assert self.done.wait(60) and isinstance(self.end, Finished), self.end
        expected = own_logprobs(model, self.ids)
        for at, row in enumerate(self.prompt):
            assert row.logprob == pytest.approx(float(expected[at, row.token]), abs=LIMIT), (len(self.ids), at)
        grown = self.ids
        for row in self.generated:
            own = own_logprobs(model, grown)[-1]
            assert row.logprob == pytest.approx(float(own[row.token]), abs=LIMIT), len(grown)
            assert row.token == int(own.argmax())
            grown = (*grown, row.token)


def ask(made: Engine, ids: tuple[int, ...], new: int = 0) -> Reply:
    reply = Reply(ids)
    made.submit(
        made.model(None),
        Ask(ids, new, logprobs=0, prompt_logprobs=0),
        on_prompt=reply.prompt.extend,
        on_token=lambda token, row: reply.generated.append(row),  # type: ignore[arg-type,func-returns-value]
        on_end=reply.on_end,
    )
    return reply


def score(made: Engine, windows: list[tuple[int, ...]]) -> list[float]:
    got: list[Any] = []
    done = threading.Event()

    def on_end(columns: Any) -> None:
        got.append(columns)
        done.set()

    asked = [ScoreWindow(ids, tuple(range(1, len(ids)))) for ids in windows]
    made.score(None, [made.model(None)], asked, overlap_k=5, on_end=on_end)
    assert done.wait(120)
    if isinstance(got[0], Exception):
        raise got[0]
    return list(got[0]["cand_nll"])


@pytest.mark.parametrize("name", BUILDERS)
def test_regimes_are_found_by_asking_the_rotary_modules(name: str) -> None:
    lengths = Lengths(replace(loaded(copy.deepcopy(BUILDERS[name]())), context_length=128))
    regimes = [lengths.regime(n) for n in range(1, 129)]
    assert len(set(regimes)) == REGIMES[name]
    assert regimes[:SWITCH] == [0] * SWITCH
    assert name == "yarn" or 0 not in regimes[SWITCH:]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", BUILDERS)
def test_windows_and_prompts_have_the_numbers_of_their_own_forward(name: str, deterministic: bool) -> None:
    """Windows of both kinds in one pack and in chunks; prompts together, cached, cut, and growing over the switch."""
    if name == "phimoe" and deterministic:
        pytest.skip("experts cannot be deterministic")
    model = BUILDERS[name]()
    windows = [tokens(n, seed=n) for n in (12, 105, 64, 20, 65, 121)]
    expected = [-float(own_logprobs(model, ids)[p - 1, ids[p]]) for ids in windows for p in range(1, len(ids))]
    text = tokens(120, seed=5)
    for budget in (4096, 30):
        made = engine_of(model, max_batch_tokens=budget, deterministic=deterministic)
        try:
            assert made.model(None).backend == ("tiled" if deterministic else "packed")
            assert score(made, windows) == pytest.approx(expected, abs=LIMIT)
            together = [ask(made, text[:n]) for n in (20, 110, 66, 64, 20)]  # nested in each other
            for reply in together:
                reply.check(model)
            ask(made, text[:20]).check(model)  # from the cache
            ask(made, text[:110]).check(model)  # over a cached short prompt
            ask(made, text[:61], 6).check(model)  # generates over the switch
            ask(made, text[:70], 2).check(model)
        finally:
            made.stop()
            made.check_integrity()
