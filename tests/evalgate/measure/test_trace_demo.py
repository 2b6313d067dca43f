"""What a trace of the demo model is worth, on the real pair demo and demo@int8 at K = 64, M = 16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evalgate.core import Window, WindowPolicy
from evalgate.corpora import load_corpus
from evalgate.measure.recordings.base import whole_rows
from evalgate.server.client import EmbeddedClient
from evalgate.server.process import EmbeddedServer
from evalgate.traces import (
    PositionBatch,
    TraceMeta,
    TraceWriter,
    compare,
    estimate_kl,
    mean_standard_error,
    needed_ids,
    read_trace,
)
from evalgate.windows import cut
from serve.engine.tail import draw, uniforms

pytestmark = pytest.mark.demo
K, M, SEEDS = 64, 16, 100
WINDOWS, CONTEXT = 16, 33  # 512 positions


@dataclass(frozen=True)
class Pair:
    """The same positions of both models: the trace's rows, exact KL, and the candidate's answers."""

    client: EmbeddedClient
    windows: tuple[Window, ...]
    batch: PositionBatch
    exact: np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with EmbeddedServer(["demo", "demo@int8"], device="cpu") as server, closing(EmbeddedClient(server)) as client:
        documents = client.tokenize("demo", load_corpus("python").documents)
        shown = cut(documents, WindowPolicy("disjoint", CONTEXT, CONTEXT), limit=WINDOWS).windows
        arrays = client.record("demo", shown, top_k=K, tail_samples=M, seed=0)
        places = [(w, p) for w in shown for p in w.positions]
        batch = PositionBatch(
            **{
                **arrays,
                "window": np.array([w.index for w, _ in places], np.int32),
                "token": np.array([w.ids[p] for w, p in places], np.int32),
                "bytes": np.array([w.bytes_per_token[p] for w, p in places], np.int32),
            }
        )
        scores = client.score(["demo@int8"], shown, reference="demo")
        yield Pair(client, shown, batch, scores.column("kl").to_numpy().astype(np.float64))


def drawn(pair: Pair) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(tail ids, their log p, their log q) [positions, seeds, M] from whole rows, and log q at the top ids [n, K]."""
    ids, log_p, log_q, top_q = [], [], [], []
    vocabulary = 262_144
    low = 0
    for window in pair.windows:
        rows = slice(low, low + len(window.positions))
        low = rows.stop
        p = torch.from_numpy(whole_rows(pair.client, "demo", window, vocabulary).copy())
        q = torch.from_numpy(whole_rows(pair.client, "demo@int8", window, vocabulary).copy())
        top = torch.from_numpy(pair.batch.top_ids[rows].astype(np.int64))
        p_lse, q_lse = (torch.logsumexp(x.double(), 1, keepdim=True) for x in (p, q))
        keys = [(window.index, i) for i in window.positions]
        numbers = np.concatenate([uniforms(seed, keys, M) for seed in range(SEEDS)], axis=1)
        tail = draw(p, top, p_lse[:, 0], torch.from_numpy(numbers)).ids
        top_q.append((q.gather(1, top).double() - q_lse).numpy())
        ids.append(tail.numpy().reshape(-1, SEEDS, M))
        log_p.append((p.gather(1, tail).double() - p_lse).numpy().reshape(-1, SEEDS, M))
        log_q.append((q.gather(1, tail).double() - q_lse).numpy().reshape(-1, SEEDS, M))
    return np.concatenate(ids), np.concatenate(log_p), np.concatenate(log_q), np.concatenate(top_q)


def test_the_estimate_is_within_two_of_its_errors_for_95_of_100_seeds(pair: Pair) -> None:
    ids, log_p, log_q, top_q = drawn(pair)
    np.testing.assert_array_equal(ids[:, 0], pair.batch.tail_ids)  # seed 0 is what the server drew
    exact = pair.exact.mean()
    within, shares, z = 0, [], []
    for seed in range(SEEDS):
        batch = replace(
            pair.batch,
            tail_ids=ids[:, seed].astype(np.int32),
            tail_logprobs=log_p[:, seed].astype(np.float32),
        )
        found = estimate_kl(batch, top_q, log_q[:, seed])
        error = mean_standard_error(found.se)
        z.append((found.kl.mean() - exact) / error)
        within += abs(z[-1]) <= 2
        shares.append(error / found.kl.mean())
    print(
        f"{len(pair.exact)} positions, exact mean KL {exact:.6f}: within 2 SE for {within} of {SEEDS} seeds, "
        f"z mean {np.mean(z):.2f} sd {np.std(z):.2f}, SE {100 * np.mean(shares):.2f} % of the mean "
        f"(worst {100 * max(shares):.2f} %)"
    )
    assert within >= 95
    assert max(shares) <= 0.03


def test_the_lower_bound_never_exceeds_the_exact_value(pair: Pair) -> None:
    needed = needed_ids(pair.batch)
    starts = np.cumsum([len(w.positions) for w in pair.windows])[:-1]
    answer = pair.client.gather("demo@int8", pair.windows, np.split(needed.ids, starts), top_k=10)
    found = compare(pair.batch, needed, answer["logprobs"])
    print(f"lower bound {found.kl_low.mean():.6f}, exact {pair.exact.mean():.6f}, estimate {found.kl.mean():.6f}")
    assert (found.kl_low <= pair.exact + 1e-6).all()  # float32 logprobs round by about that
    assert found.kl_low.mean() > 0.5 * pair.exact.mean()


def test_a_position_takes_at_most_700_bytes(pair: Pair, tmp_path: Path) -> None:
    info = pair.client.models()["demo"]
    policy = WindowPolicy("disjoint", CONTEXT, CONTEXT)
    meta = TraceMeta(info, "built-in", "hash", policy, top_k=K, tail_samples=M)
    writer = TraceWriter(tmp_path / "demo.trace", meta, windows=pair.windows)
    writer.append(pair.batch)
    writer.finish()
    trace = read_trace(tmp_path / "demo.trace")
    shards = sum(entry.size for entry in trace.manifest.shards.values())
    print(f"{shards / len(trace):.0f} bytes a position, {8000 * shards / len(trace) / 1e6:.2f} MB for 8,000")
    assert shards / len(trace) <= 700
