"""Windows longer than a forward: the numbers of one forward, in memory that grows with window x width alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as t
from torch.utils._python_dispatch import TorchDispatchMode

from serve.config import EngineConfig
from serve.engine.pair import ScoreWindow, _through_pages, scored_rows
from serve.engine.runtime import ModelRuntime
from tests.serve.architectures import built, loaded, tokens

VOCABULARY, WIDTH = 30_000, 32


class Largest(TorchDispatchMode):
    """The largest storage that any operation gives, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, torch.Tensor):
                self.bytes = max(self.bytes, each.untyped_storage().nbytes())
        return out


def model(**more: Any) -> ModelRuntime:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = t.LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=8192, **sizes)
    return runtime(t.LlamaForCausalLM(config).eval(), **more)


def runtime(built_model: Any, **more: Any) -> ModelRuntime:
    config = EngineConfig(device="cpu", tile_bytes=1 << 20, **{"max_batch_tokens": 256} | more)
    known = replace(loaded(copy.deepcopy(built_model)), context_length=built_model.config.max_position_embeddings)
    return ModelRuntime(known, config, kv_memory=64 << 20)


@contextmanager
def watched() -> Iterator[Largest]:
    with torch.inference_mode(), Largest() as seen:
        yield seen


def test_memory_grows_with_the_window_and_not_with_the_vocabulary() -> None:
    """No tensor of 4,096 tokens is as large as its logits, or as a mask of all pairs, and twice the window is twice
    it."""
    ours = model()
    sizes = []
    for n in (2048, 4096):
        window = ScoreWindow(tokens(n, seed=n), (1, n // 2, n - 1))
        with watched() as seen:
            rows = scored_rows(ours, [window])
        assert rows.shape == (3, WIDTH)
        sizes.append(seen.bytes)
    few = 4096 * WIDTH * 4
    assert sizes[1] <= 2.1 * sizes[0]
    assert sizes[1] <= 16 * few < 4096 * 4096 * 4 < 4096 * VOCABULARY * 4


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2", "gpt_oss"])
def test_the_numbers_are_those_of_chunks_through_all_layers(name: str) -> None:
    """Full and sliding attention, soft caps and sinks: to the last bit what the pages of the whole model give."""
    ours = runtime(built(name), max_batch_tokens=16)
    window = ScoreWindow(tokens(60, seed=2), (1, 15, 16, 17, 40, 59))
    with torch.inference_mode():
        got = scored_rows(ours, [window])
        want = _through_pages(ours, window)
    assert torch.equal(got, want)
    assert ours.pool.free == ours.pool.capacity


def test_a_window_needs_no_room_in_the_servers_pages() -> None:
    ours = model(max_batch_tokens=64)
    ours.pool.take(ours.pool.free)
    window = ScoreWindow(tokens(300, seed=2), (299,))
    with torch.inference_mode():
        assert bool(torch.isfinite(scored_rows(ours, [window])).all())


def test_eager_scores_are_bounded() -> None:
    """Soft-capped attention keeps its scores: it takes fewer rows at once where the window is long."""
    from serve.engine.attention import _SCORES, _rows_at_once
    from serve.engine.interface import Shape

    capped, plain = Shape(1.0, None, 50.0, None), Shape(1.0, None, None, None)
    assert _rows_at_once(8, 512, capped) == _rows_at_once(64, 1 << 20, plain) == 1024
    assert _rows_at_once(8, 32768, capped) * 8 * 32768 <= _SCORES
