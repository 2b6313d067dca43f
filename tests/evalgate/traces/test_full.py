"""Full traces against brute force in float64, and what float16 rounding can move."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from evalgate.errors import MismatchError, ScoreError
from evalgate.traces import compare_full, condense
from tests.evalgate.trace_samples import log_softmax, one_row_places, slow_js, slow_kl, slow_tv, zipf_logits

N, V = 20, 400


def rows(*, noise: float = 0.3):
    p = zipf_logits(N, V, seed=1)
    q = p + np.random.default_rng(2).normal(0, noise, p.shape).astype(np.float32)
    batch = condense(p, one_row_places(N, V), top_k=16, tail_samples=4, seed=0, full=True)
    return batch, log_softmax(p), q, log_softmax(q)


def test_every_divergence_agrees_with_brute_force_and_the_rounding_bound_holds():
    batch, log_p, q, log_q = rows()
    found = compare_full(batch, q, log_q.argmax(axis=1).astype(np.int32))
    kl = slow_kl(log_p, log_q)
    assert (np.abs(found.kl - kl) <= found.rounding + 1e-5).all()
    assert found.rounding.max() < 5e-3
    np.testing.assert_allclose(found.kl, kl, rtol=2e-3)
    np.testing.assert_allclose(found.reverse_kl, slow_kl(log_q, log_p), rtol=5e-3, atol=1e-4)
    np.testing.assert_allclose(found.js, slow_js(log_p, log_q), rtol=2e-3, atol=1e-5)
    np.testing.assert_allclose(found.tv, slow_tv(log_p, log_q), rtol=2e-3, atol=1e-4)
    best = np.take_along_axis(log_p, log_q.argmax(axis=1)[:, None], axis=1)[:, 0]
    np.testing.assert_allclose(found.regret, log_p.max(axis=1) - best, atol=5e-3)


def test_a_model_against_itself_is_within_its_rounding_of_zero():
    batch, _, _, log_p = rows(noise=0.0)
    found = compare_full(batch, zipf_logits(N, V, seed=1), batch.top1)
    assert (found.kl <= found.rounding + 1e-9).all() and (found.kl >= 0).all()
    assert (found.regret == 0).all()


def test_what_cannot_be_compared_is_refused():
    batch, _, q, log_q = rows()
    best = log_q.argmax(axis=1).astype(np.int32)
    with pytest.raises(MismatchError):
        compare_full(batch, q[:, :-1], best)
    with pytest.raises(ScoreError, match="--full"):
        compare_full(replace(batch, shifted=None, lse=None), q, best)
    broken = q.copy()
    broken[3, 7] = np.nan
    with pytest.raises(ScoreError, match="window 3, position 1"):
        compare_full(batch, broken, best)
    ruled = q.copy()
    ruled[4, 9] = -np.inf
    with pytest.raises(ScoreError, match="window 4, position 1"):
        compare_full(batch, ruled, best)
