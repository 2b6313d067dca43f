"""The golden reference: 48 short sequences on the demo model, the 64 likeliest of every position, float32.

`python -m tests.serve.golden` records it anew (tests/data/golden/demo.npz). Logprobs are kept as float32, ids as
int32; one row per position 1.. of each sequence, sequences one after the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

PATH = Path(__file__).parents[1] / "data" / "golden" / "demo.npz"
SEQUENCES, K = 48, 64


class Golden(NamedTuple):
    """tokens: of each sequence. ids, logprobs [rows, K]; actual [rows]: logprob of the token that stands there."""

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


def record() -> None:
    """Record with the model's own forward, one sequence at a time: no engine, no cache, no batch."""
    import torch

    from serve.config import ModelSpec
    from serve.models.load import load_models

    (loaded,) = load_models([ModelSpec("demo")], device="cpu")
    runs = sequences(loaded.vocab_size - 300)
    ids, logprobs, actual = [], [], []
    for run in runs:
        with torch.inference_mode():
            logits = loaded.model(input_ids=torch.tensor([run]), use_cache=False).logits[0, :-1]
        rows = torch.log_softmax(logits.double(), dim=-1)
        for row, token in zip(rows, run[1:], strict=True):
            values, order = row.sort(descending=True, stable=True)
            ids.append(order[:K].numpy().astype(np.int32))
            logprobs.append(values[:K].float().numpy())
            actual.append(float(row[token]))
    PATH.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        PATH,
        lengths=np.array([len(run) for run in runs], dtype=np.int32),
        tokens=np.array([t for run in runs for t in run], dtype=np.int32),
        ids=np.stack(ids),
        logprobs=np.stack(logprobs),
        actual=np.array(actual, dtype=np.float32),
    )


if __name__ == "__main__":
    record()
