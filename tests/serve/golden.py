"""The golden reference: 48 short sequences on the demo model, the 64 likeliest ids of every position, in float64.

`python -m tests.serve.golden` records it anew (tests/data/golden/demo.npz): one row per position 1.. of each sequence,
sequences one after the other. Float64 rounds 2^29 times finer than the engine does, so the stored figures belong to no
processor, thread count or build of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from serve.config import ModelSpec
from serve.models.load import load_models

PATH = Path(__file__).parents[1] / "data" / "golden" / "demo.npz"
SEQUENCES, K = 48, 64


class Golden(NamedTuple):
    """tokens: of each sequence. ids, logprobs [rows, K]; actual [rows]: logprob of the sequence's own next token."""

    tokens: list[tuple[int, ...]]
    ids: np.ndarray
    logprobs: np.ndarray
    actual: np.ndarray


def read() -> Golden:
    """The stored reference."""
    with np.load(PATH) as stored:
        ends = np.cumsum(stored["lengths"])
        runs = [tuple(int(t) for t in run) for run in np.split(stored["tokens"], ends[:-1])]
        return Golden(runs, stored["ids"], stored["logprobs"], stored["actual"])


def sequences(size: int) -> list[tuple[int, ...]]:
    """48 sequences of 3..20 ids: seeded, some nested and some sharing a start, as real traffic has them."""
    rng = np.random.default_rng(48)
    made: list[tuple[int, ...]] = []
    for i in range(SEQUENCES):
        fresh = (2, *(int(t) for t in rng.integers(100, size, rng.integers(2, 20))))
        if i % 6 == 4:
            fresh = made[-1][: max(3, len(made[-1]) // 2)]
        if i % 6 == 5:
            fresh = (*made[-2][:8], *fresh[1:12])
        made.append(fresh)
    return made


def padded(model: Any, runs: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Logits [len(run), vocabulary] of each sequence, from the model's own forward of a batch padded on the right."""
    longest = max(map(len, runs))
    ids = torch.tensor([[*run, *[0] * (longest - len(run))] for run in runs])
    mask = torch.tensor([[1] * len(run) + [0] * (longest - len(run)) for run in runs])
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return [rows[: len(run)] for rows, run in zip(logits, runs, strict=True)]


def record() -> None:
    """Record with the model's own forward on a float64 copy: no engine, no cache.

    transformers casts to float32 inside norms and rotary embeddings; those casts go to float64 here.
    """
    (loaded,) = load_models([ModelSpec("demo")], device="cpu")
    model = loaded.model.double()
    runs = sequences(loaded.vocab_size - 300)
    ids, logprobs, actual = [], [], []
    for low in range(0, len(runs), 12):
        part = runs[low : low + 12]
        with patch.object(torch.Tensor, "float", torch.Tensor.double):
            every = padded(model, part)
        for run, logits in zip(part, every, strict=True):
            assert logits.dtype == torch.float64
            rows = torch.log_softmax(logits[:-1], dim=-1)
            top = rows.topk(K)
            ids.append(top.indices.numpy().astype(np.int32))
            logprobs.append(top.values.numpy())
            actual.extend(rows[range(len(rows)), run[1:]].tolist())
    np.savez_compressed(
        PATH,
        lengths=np.array([len(run) for run in runs], dtype=np.int32),
        tokens=np.array([t for run in runs for t in run], dtype=np.int32),
        ids=np.concatenate(ids),
        logprobs=np.concatenate(logprobs),
        actual=np.array(actual),
    )


if __name__ == "__main__":
    record()
