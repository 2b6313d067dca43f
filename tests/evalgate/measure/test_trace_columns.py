"""What a run makes of a trace and of the embedded server's answers, with a server that is arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evalgate.core import Window
from evalgate.measure.recordings.trace import LIKELIEST, RecordedTrace
from evalgate.traces import TraceWriter, condense, read_trace
from tests.evalgate.trace_samples import log_softmax, meta, one_row_places, zipf_logits
from tests.evalgate.traces.estimator_pairs import exact, leaked

N, VOCABULARY = 120, 500


class Arithmetic:
    """An embedded client whose model gives log_q [windows, vocabulary] at the one position of each window."""

    def __init__(self, log_q: np.ndarray) -> None:
        self._log_q = log_q
        self.asked: list[int] = []

    def gather(self, model: str, windows: Sequence[Window], wanted: Sequence[np.ndarray], *, top_k: int) -> Any:
        self.asked.append(top_k)
        log_q = self._log_q[[w.index for w in windows]]
        ids = np.concatenate(wanted)
        best = np.argsort(-log_q, axis=1, kind="stable")[:, :top_k].astype(np.int32)
        token = np.array([[w.ids[1]] for w in windows])
        listed = np.take_along_axis(log_q, best, axis=1)
        return {
            "logprobs": np.where(ids >= 0, np.take_along_axis(log_q, np.maximum(ids, 0), axis=1), -np.inf),
            "nll": -np.take_along_axis(log_q, token, axis=1)[:, 0],
            "entropy": -(np.exp(log_q) * log_q).sum(axis=1),
            "top1": best[:, 0],
            "margin": listed[:, 0] - listed[:, 1],
            "rank": 1 + (log_q > np.take_along_axis(log_q, token, axis=1)).sum(axis=1).astype(np.int32),
            "top_ids": best,
            "top_logprobs": listed.astype(np.float32),
        }


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[RecordedTrace, np.ndarray]:
    logits = zipf_logits(N, VOCABULARY, seed=3).astype(np.float64)
    places = one_row_places(N, VOCABULARY)
    writer = TraceWriter(tmp_path / "ref.trace", meta(VOCABULARY, k=32, m=16), windows=[w for w, _ in places])
    writer.append(condense(logits, places, top_k=32, tail_samples=16))
    writer.finish()
    return RecordedTrace(read_trace(tmp_path / "ref.trace"), "ref.trace"), logits


def test_a_token_that_the_candidate_leaks_is_seen_by_its_own_likeliest_ids(
    recorded: tuple[RecordedTrace, np.ndarray],
) -> None:
    """KL 0.223 where the draws alone say 0.023."""
    trace, logits = recorded
    log_q = leaked(logits + np.random.default_rng(0).normal(0, 0.06, logits.shape))
    client: Any = Arithmetic(log_q)
    windows = trace.trace.windows
    table, notes = trace.finished(trace.table(client, ["leaking"], windows))
    kl = table.column("kl").to_numpy()
    assert kl.mean() == pytest.approx(exact(logits, log_q), rel=2e-3)
    assert {"kl_plain", "kl_plain_se", "kl_rare"}.isdisjoint(table.column_names)
    assert client.asked == [LIKELIEST] and not any("control variate" in note for note in notes)
    assert table.column("topk_overlap").to_numpy().mean() > 0.5  # of ten, however many are asked for


def test_a_candidate_far_from_the_reference_is_estimated_without_the_control_variate(
    recorded: tuple[RecordedTrace, np.ndarray],
) -> None:
    trace, logits = recorded
    log_q = log_softmax(zipf_logits(N, VOCABULARY, seed=4))
    client: Any = Arithmetic(log_q)
    table, _ = trace.finished(trace.table(client, ["far"], trace.trace.windows))
    error = np.sqrt(np.square(table.column("kl_se").to_numpy().astype(float)).sum()) / N
    truth = exact(logits, log_q)
    assert abs(table.column("kl").to_numpy().mean() - truth) < 4 * error < 0.02 * truth
