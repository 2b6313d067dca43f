"""The estimated mean against exact ones: what draws of the reference cannot see, and that nothing is biased for it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from evalgate.errors import ScoreError, UsageError
from evalgate.traces import (
    KlEstimate,
    PositionBatch,
    TopList,
    compare,
    concatenate,
    condense,
    estimate_kl,
    needed_ids,
    settled,
)
from evalgate.traces.batch import check_batch
from evalgate.traces.estimate import surplus_ids
from tests.evalgate.trace_samples import log_softmax, one_row_places, slow_kl, zipf_logits
from tests.evalgate.traces.estimator_pairs import PAIRS, estimated, exact, leaked, qualities

P = np.array([[2.0, 1.2, 0.6, -0.5, -1.5], [1.5, 1.4, 0.2, 0.1, -3.0], [0.4, 0.3, 0.2, 0.1, 0.0]])
Q = np.array([[0.5, 1.0, 0.9, -2.0, 1.9], [1.0, 1.6, -1.0, 0.3, 0.8], [0.6, 0.1, 0.3, -0.2, 0.3]])


def picked(values: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, np.maximum(ids, 0).astype(np.int64), axis=1)


def drawn(rows: PositionBatch, log_p: np.ndarray, ids: np.ndarray) -> PositionBatch:
    """The same rows with these tail ids [n, M]."""
    return replace(rows, tail_ids=ids.astype(np.int32), tail_logprobs=picked(log_p, ids).astype(np.float32))


def likeliest(log_q: np.ndarray, listed: int) -> TopList:
    ids = np.argsort(-log_q, axis=1, kind="stable")[:, :listed]
    return TopList(ids, picked(log_q, ids))


def estimate(rows: PositionBatch, log_q: np.ndarray, listed: int) -> KlEstimate:
    return estimate_kl(rows, picked(log_q, rows.top_ids), picked(log_q, rows.tail_ids), likeliest(log_q, listed))


def chances(rows: PositionBatch, log_p: np.ndarray, row: int, m: int) -> tuple[np.ndarray, np.ndarray]:
    """Every outcome [outcomes, M] of one position's draws and its probability."""
    tail = [v for v in range(log_p.shape[1]) if v not in rows.top_ids[row]]
    ids = np.array(list(product(tail, repeat=m)))
    p = np.exp(log_p[row])
    return ids, np.prod(p[ids] / p[tail].sum(), axis=1)


@pytest.mark.parametrize(("k", "m", "listed"), [(0, 1, 3), (1, 1, 3), (2, 2, 5), (1, 4, 3), (1, 5, 0), (2, 6, 5)])
def test_a_position_is_unbiased_over_every_outcome_of_its_draws(k: int, m: int, listed: int) -> None:
    """Exactly so: all outcomes are gone through, for far and near pairs, with and without the candidate's list."""
    for p_logits, q_logits in ((P, Q), (P, P + 0.01 * Q)):
        log_p, log_q = log_softmax(p_logits), log_softmax(q_logits)
        whole = condense(p_logits, one_row_places(3, 5), top_k=k, tail_samples=m)
        for row, want in enumerate(slow_kl(log_p, log_q)):
            ids, weights = chances(whole, log_p, row, m)
            same = np.full(len(ids), row)
            found = estimate(drawn(whole.take(same), log_p[same], ids), log_q[same], listed)
            assert weights @ found.kl == pytest.approx(want, abs=1e-6)
            assert weights @ found.plain == pytest.approx(want, abs=1e-6)
            spread = weights @ np.square(found.plain - want)
            stated = weights @ np.square(found.plain_se)
            assert stated == pytest.approx(spread, abs=1e-6) if m > 1 else stated >= spread - 1e-6


@pytest.mark.parametrize("errors", [0.3, 1.2])
def test_what_other_positions_decide_biases_nothing(errors: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evalgate.traces.estimate._POOLED_UNSEEN", errors)
    log_p, log_q = log_softmax(P), log_softmax(Q)
    rows = condense(P, one_row_places(3, 5), top_k=2, tail_samples=2)
    singles = []
    for row in range(3):
        ids, weights = chances(rows, log_p, row, 2)
        same = np.full(len(ids), row)
        singles.append((estimate(drawn(rows.take(same), log_p[same], ids), log_q[same], 0), weights))
    total, plain = np.zeros(3), 0.0
    for outcome in product(*(range(len(weights)) for _, weights in singles)):
        weight = np.prod([singles[row][1][at] for row, at in enumerate(outcome)])
        names = ("kl", "se", "plain", "plain_se", "rare")
        joint = {n: np.array([getattr(singles[row][0], n)[at] for row, at in enumerate(outcome)]) for n in names}
        found = settled(KlEstimate(**joint))
        total += weight * found.kl
        plain += weight * found.plain.mean()
    assert 0.02 < plain < 0.98
    np.testing.assert_allclose(total, slow_kl(log_p, log_q), atol=1e-6)


def test_a_token_that_the_candidate_leaks_is_seen() -> None:
    """20 % of the candidate on an id that no draw hits: 0.2231, where draws alone said 0.0231 +- 1e-10."""
    logits = zipf_logits(200, 1000, seed=3).astype(np.float64)
    log_q = leaked(logits)
    truth = exact(logits, log_q)
    assert truth == pytest.approx(-np.log(0.8), abs=1e-3)
    for k, m in ((64, 16), (8, 16), (64, 1), (8, 2), (0, 16), (0, 1)):
        rows = condense(logits, one_row_places(200, 1000), top_k=k, tail_samples=m)
        for listed in (32, 1, 0):
            mean, error = estimated(rows, log_q, listed=listed)
            assert mean == pytest.approx(truth, rel=0.02), (k, m, listed)
            assert abs(mean - truth) <= 3 * error + 1e-4
    rows = condense(logits, one_row_places(200, 1000), top_k=64, tail_samples=16)
    alone = estimate(rows, log_q, 32)
    assert alone.kl.mean() == pytest.approx(truth, rel=1e-3)


def test_a_leak_at_few_positions_is_seen_there_and_spoils_no_other() -> None:
    logits = zipf_logits(300, 1000, seed=5).astype(np.float64)
    log_q = log_softmax(logits + np.random.default_rng(0).normal(0, 0.06, logits.shape))
    log_q[:15] = leaked(logits[:15])
    rows = condense(logits, one_row_places(300, 1000), top_k=64, tail_samples=16)
    found = settled(estimate(rows, log_q, 32))
    truth = slow_kl(log_softmax(logits), log_q)
    assert found.kl.mean() == pytest.approx(truth.mean(), rel=0.01)
    assert np.abs(found.kl[15:] - truth[15:]).mean() < 0.15 * truth[15:].mean()


@pytest.mark.parametrize("kind", PAIRS)
def test_estimated_means_are_near_and_their_errors_hold(kind: str) -> None:
    """benchmarks/trace_estimator.py has more recordings, and K = 0."""
    for k, most in ((8, 0.1), (64, 0.08)):
        for m, found in qualities(kind, k=k, draws=(1, 16), positions=60, vocabulary=600, recordings=30).items():
            assert abs(found.bias) <= 4 * found.bias_error + 2e-4 * found.truth, (k, m)
            assert found.inside >= 0.8, (k, m)
            if m == 16:
                assert found.rmse <= most * found.truth, (k, m)


def test_only_ids_that_the_reference_cannot_like_as_much_are_left_out() -> None:
    logits = zipf_logits(50, 400, seed=8).astype(np.float64)
    log_q = log_softmax(zipf_logits(50, 400, seed=9))
    rows = condense(logits, one_row_places(50, 400), top_k=16, tail_samples=4)
    ids, mass = surplus_ids(rows, likeliest(log_q, 20))
    p, q = np.exp(log_softmax(logits)), np.exp(log_q)
    assert (ids >= 0).any()
    for row in range(50):
        mine = ids[row][ids[row] >= 0]
        assert not set(mine.tolist()) & set(rows.top_ids[row].tolist())
        assert (q[row, mine] > 2 * p[row, mine]).all()
        assert mass[row] == pytest.approx(q[row, mine].sum())
    near = likeliest(log_softmax(logits + 0.05), 20)
    assert (surplus_ids(rows, near)[0] == -1).all()


def test_the_smallest_traces_work_or_are_refused() -> None:
    logits, places = zipf_logits(6, 50, seed=1), one_row_places(6, 50)
    log_q = log_softmax(zipf_logits(6, 50, seed=1) + 0.1)
    none = condense(logits, places, top_k=0, tail_samples=3)
    assert none.top_ids.shape == (6, 0) and np.allclose(none.tail_mass, 1)
    assert np.isfinite(estimate(none, log_q, 5).kl).all()
    with pytest.raises(UsageError, match="keeps no likeliest ids"):
        compare(none, needed_ids(none), picked(log_q, needed_ids(none).ids))
    one = condense(logits, places, top_k=4, tail_samples=1)
    needed = needed_ids(one)
    pair = compare(one, needed, picked(log_q, needed.ids), likeliest(log_q, 5))
    assert np.isfinite(pair.kl).all() and (pair.kl_se > 0).all()
    for k in (0, 4):
        with pytest.raises(UsageError, match="draw 1 or more"):
            condense(logits, places, top_k=k, tail_samples=0)
    with pytest.raises(UsageError, match="0 or more"):
        condense(logits, places, top_k=-1)
    undrawn = replace(one, tail_ids=one.tail_ids[:, :0], tail_logprobs=one.tail_logprobs[:, :0])
    with pytest.raises(ScoreError, match=r"window 0, position 1: .*nothing was drawn of it"):
        estimate(undrawn, log_q, 5)
    whole = condense(logits, places, top_k=50, tail_samples=0)
    np.testing.assert_allclose(estimate(whole, log_q, 5).kl, slow_kl(log_softmax(logits), log_q), atol=1e-6)


@pytest.mark.parametrize("mask", [-1e30, -65504.0, -1e4, -np.inf])
def test_a_masked_logit_is_no_value(mask: float) -> None:
    logits, places = zipf_logits(6, 50, seed=1), one_row_places(6, 50)
    rows = condense(logits, places, top_k=8, tail_samples=4)
    needed = needed_ids(rows)
    masked = logits.astype(np.float64)
    masked[3, rows.top_ids[3, 2]] = mask
    log_q = log_softmax(masked)
    with pytest.raises(ScoreError, match=r"window 3, position 1: .*that of a mask.*id "):
        compare(rows, needed, picked(log_q, needed.ids))
    with pytest.raises(ScoreError, match="window 3, position 1"):
        estimate(rows, log_q, 0)
    with np.errstate(over="ignore"):
        recorded = condense(masked, places, top_k=50, tail_samples=0)
    assert np.isneginf(recorded.top_logprobs[3, -1]) and np.isfinite(recorded.top_logprobs[3, :-1]).all()
    token = logits.astype(np.float64)
    token[2, rows.token[2]] = mask
    with pytest.raises(ScoreError, match="window 2, position 1"):
        condense(token, places)
    wrong = replace(
        rows, top_logprobs=np.where(rows.top_logprobs < rows.top_logprobs[:, -2:-1], -2e3, rows.top_logprobs)
    )
    with pytest.raises(ScoreError, match="a top logprob is not one"):
        check_batch(wrong.take(np.array([0])), vocab_size=50, top_k=8, tail_samples=4, full=False)


def test_no_position_is_asked_for_nothing() -> None:
    rows = condense(zipf_logits(4, 50, seed=1), one_row_places(4, 50), top_k=8, tail_samples=4)
    nothing = rows.take(np.array([], dtype=np.int64))
    log_q = log_softmax(zipf_logits(4, 50, seed=2))[:0]
    assert len(settled(estimate(nothing, log_q, 5)).kl) == 0
    assert len(concatenate([nothing, rows])) == 4
