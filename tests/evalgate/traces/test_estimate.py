from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalgate.errors import ScoreError, UsageError
from evalgate.traces import (
    TraceWriter,
    chosen_token_terms,
    compare,
    condense,
    estimate_kl,
    mean_standard_error,
    needed_ids,
    read_trace,
)
from evalgate.traces.condense import draw_tail
from evalgate.traces.toplists import look_up
from tests.evalgate.trace_samples import (
    log_softmax,
    meta,
    one_row_places,
    slow_js,
    slow_kl,
    slow_tv,
    zipf_logits,
)


def real_pair(n: int, vocabulary: int, *, seed: int, noise: float = 0.06) -> tuple[np.ndarray, np.ndarray]:
    logits = zipf_logits(n, vocabulary, seed=seed)
    return logits, (logits + np.random.default_rng(seed + 1).normal(0, noise, logits.shape)).astype(np.float32)


def at(values: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, np.maximum(ids, 0).astype(np.int64), axis=1)


def test_condense_against_slow_definitions():
    logits = np.round(zipf_logits(12, 40, seed=2), 0)  # rounded: ties
    places = one_row_places(12, 40)
    rows = condense(logits, places, top_k=6, tail_samples=4, full=True)
    log_p = log_softmax(logits)
    for row, (window, _) in enumerate(places):
        order = sorted(range(40), key=lambda v: (-logits[row, v], v))
        assert rows.top_ids[row].tolist() == order[:6]
        assert rows.rank[row] == order.index(window.ids[1]) + 1
        assert rows.logprob[row] == np.float32(log_p[row, window.ids[1]])
        assert rows.entropy[row] == pytest.approx(-sum(np.exp(x) * x for x in log_p[row]), rel=1e-6)
        assert rows.tail_mass[row] == pytest.approx(sum(np.exp(log_p[row, v]) for v in order[6:]), rel=1e-6)
        assert not set(rows.tail_ids[row]) & set(order[:6])
    np.testing.assert_array_equal(rows.tail_logprobs, at(log_p, rows.tail_ids).astype(np.float32))
    np.testing.assert_allclose(rows.full_logprobs(), log_p, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(rows.margin, rows.top_logprobs[:, 0] - rows.top_logprobs[:, 1])
    assert np.array_equal(rows.top1, logits.argmax(axis=1))


def test_full_rows_keep_kl_to_their_rounding():
    logits, other = real_pair(40, 3000, seed=1)
    rows = condense(logits, one_row_places(40, 3000), full=True)
    log_q = log_softmax(other)
    exact = slow_kl(log_softmax(logits), log_q)
    assert abs(slow_kl(rows.full_logprobs(), log_q).mean() - exact.mean()) < 0.05 * exact.mean()
    far = np.array([[0.0, -70000.0, -1.0]])
    censored = condense(far, one_row_places(1, 1), top_k=2, tail_samples=2, full=True)
    assert np.isneginf(censored.full_logprobs()[0, 1])
    with pytest.raises(ScoreError, match="--full"):
        condense(logits, one_row_places(40, 3000)).full_logprobs()


def test_draws_do_not_depend_on_the_batch_and_depend_on_the_seed():
    logits, places = zipf_logits(6, 200, seed=4), one_row_places(6, 200)
    whole = condense(logits, places, top_k=8, tail_samples=8, seed=5)
    part = condense(logits[3:], places[3:], top_k=8, tail_samples=8, seed=5)
    np.testing.assert_array_equal(whole.tail_ids[3:], part.tail_ids)
    assert (condense(logits, places, top_k=8, tail_samples=8, seed=6).tail_ids != whole.tail_ids).any()


def test_draws_follow_p_restricted_to_the_tail():
    log_p = log_softmax(np.array([3.0, 2.0, 1.0, 0.5, 0.0, -1.0, -np.inf]))
    drawn = draw_tail(log_p, np.array([0, 4]), 40000, np.random.default_rng(0))
    share = np.bincount(drawn, minlength=7) / 40000
    want = np.exp(log_p)
    want[[0, 4]] = 0
    np.testing.assert_allclose(share, want / want.sum(), atol=0.01)
    assert share[6] == share[0] == share[4] == 0


def test_estimates_are_unbiased_and_their_errors_true():
    n, vocabulary = 60, 1500
    logits, other = real_pair(n, vocabulary, seed=11)
    log_q = log_softmax(other)
    exact = slow_kl(log_softmax(logits), log_q).mean()
    places = one_row_places(n, vocabulary)
    inside, means = 0, []
    for seed in range(100):
        rows = condense(logits, places, top_k=32, tail_samples=16, seed=seed)
        got = estimate_kl(rows, at(log_q, rows.top_ids), at(log_q, rows.tail_ids))
        inside += abs(got.kl.mean() - exact) <= 2 * mean_standard_error(got.se)
        means.append(got.kl.mean())
    assert 89 <= inside <= 100
    assert abs(np.mean(means) - exact) < 3 * np.std(means) / 10


def test_the_error_of_a_realistic_run_is_below_3_percent():
    n, vocabulary = 2000, 4000
    logits, other = real_pair(n, vocabulary, seed=21)
    log_p, log_q = log_softmax(logits), log_softmax(other)
    exact = (np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean()
    rows = condense(logits, one_row_places(n, vocabulary))
    got = estimate_kl(rows, at(log_q, rows.top_ids), at(log_q, rows.tail_ids))
    error = mean_standard_error(got.se)
    assert error < 0.03 * exact
    assert abs(got.kl.mean() - exact) < 4 * error


@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
def test_the_whole_vocabulary_is_exact_to_storage(tmp_path, scale):
    rng = np.random.default_rng(3)
    n, vocabulary = 30, 60
    logits = rng.normal(0, scale, (n, vocabulary)).astype(np.float32)
    log_q = log_softmax(logits + rng.normal(0, 0.05, logits.shape))
    places = one_row_places(n, vocabulary)
    writer = TraceWriter(tmp_path / "t", meta(vocabulary, k=vocabulary, m=0), windows=[w for w, _ in places])
    writer.append(condense(logits, places, top_k=vocabulary, tail_samples=0))
    writer.finish()
    rows = read_trace(tmp_path / "t").rows()
    got = estimate_kl(rows, at(log_q, rows.top_ids), np.zeros((n, 0)))
    assert np.abs(got.kl - slow_kl(log_softmax(logits), log_q)).max() < 1e-6
    assert (got.se == 0).all()


def test_storage_moves_an_estimate_by_less_than_a_millionth():
    logits, other = real_pair(50, 3000, seed=31)
    log_p, log_q = log_softmax(logits), log_softmax(other)
    rows = condense(logits, one_row_places(50, 3000))
    got = estimate_kl(rows, at(log_q, rows.top_ids), at(log_q, rows.tail_ids)).kl
    for row in range(50):
        top, tail = rows.top_ids[row], rows.tail_ids[row]
        p, q = log_p[row], log_q[row]
        head = sum(np.exp(p[v]) * (p[v] - q[v]) - np.exp(p[v]) + np.exp(q[v]) for v in top)
        mass = 1 - sum(np.exp(p[v]) for v in top)
        want = head + mass * np.mean([np.exp(q[v] - p[v]) - 1 + p[v] - q[v] for v in tail])
        assert abs(got[row] - want) < 1e-6


@given(st.integers(0, 10**6), st.floats(0.01, 30), st.floats(0, 5))
@settings(max_examples=60, deadline=None)
def test_estimates_are_finite_and_bounds_hold(seed, scale, noise):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, scale, (4, 40))
    log_q = log_softmax(logits + rng.normal(0, noise, logits.shape))
    rows = condense(logits, one_row_places(4, 40), top_k=5, tail_samples=3)
    needed = needed_ids(rows)
    pair = compare(rows, needed, at(log_q, needed.ids))
    exact = slow_kl(log_softmax(logits), log_q)
    assert np.isfinite(pair.kl).all() and (pair.kl_se >= 0).all()
    assert (pair.kl_low <= exact * (1 + 1e-5) + 1e-6).all()
    assert (pair.tv_low <= slow_tv(log_softmax(logits), log_q) + 1e-6).all()
    assert (pair.tv_high >= slow_tv(log_softmax(logits), log_q) - 1e-6).all()
    assert (pair.js_low <= slow_js(log_softmax(logits), log_q) + 1e-6).all()
    assert (pair.js_high >= slow_js(log_softmax(logits), log_q) - 1e-6).all()
    told = pair.determined
    assert (pair.top1[told] == log_q.argmax(axis=1)[told]).all()


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_the_order_of_kept_ids_does_not_matter(seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (5, 60))
    log_q = log_softmax(logits + rng.normal(0, 0.3, logits.shape))
    rows = condense(logits, one_row_places(5, 60), top_k=8, tail_samples=4)
    a = estimate_kl(rows, at(log_q, rows.top_ids), at(log_q, rows.tail_ids))
    top, tail = rng.permutation(8), rng.permutation(4)
    mixed = replace(
        rows,
        top_ids=rows.top_ids[:, top],
        top_logprobs=rows.top_logprobs[:, top],
        tail_ids=rows.tail_ids[:, tail],
        tail_logprobs=rows.tail_logprobs[:, tail],
    )
    b = estimate_kl(mixed, at(log_q, mixed.top_ids), at(log_q, mixed.tail_ids))
    np.testing.assert_allclose(a.kl, b.kl, rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(a.se, b.se, rtol=1e-9, atol=1e-14)


def test_identical_sides_give_zero():
    logits = zipf_logits(20, 500, seed=1)
    log_q = log_softmax(logits)
    rows = condense(logits, one_row_places(20, 500))
    needed = needed_ids(rows)
    pair = compare(rows, needed, at(log_q, needed.ids))
    assert pair.kl.max() < 1e-12 and pair.kl_low.max() < 1e-6 and pair.tv_low.max() < 1e-6
    assert (pair.agreement[pair.determined] == 1).all() and (pair.regret[pair.determined] == 0).all()


def test_needed_ids_are_each_row_once():
    rows = condense(zipf_logits(30, 120, seed=6), one_row_places(30, 120), top_k=16, tail_samples=16)
    needed = needed_ids(rows)
    log_p = log_softmax(zipf_logits(30, 120, seed=6))
    for row in range(30):
        want = sorted({int(rows.token[row]), *rows.top_ids[row].tolist(), *rows.tail_ids[row].tolist()})
        assert [v for v in needed.ids[row].tolist() if v >= 0] == want
        assert needed.ids[row].tolist() == want + [-1] * (needed.ids.shape[1] - len(want))
        np.testing.assert_allclose(needed.log_p[row, : len(want)], log_p[row, want], rtol=1e-6)
    assert (needed.ids >= 0).sum(axis=1).max() == needed.ids.shape[1]


def test_compare_reads_the_right_ids():
    logits, other = real_pair(40, 800, seed=41, noise=0.8)
    log_p, log_q = log_softmax(logits), log_softmax(other)
    rows = condense(logits, one_row_places(40, 800))
    needed = needed_ids(rows)
    pair = compare(rows, needed, at(log_q, needed.ids))
    direct = estimate_kl(rows, at(log_q, rows.top_ids), at(log_q, rows.tail_ids))
    np.testing.assert_allclose(pair.kl, direct.kl)
    np.testing.assert_allclose(pair.kl_se, direct.se)
    np.testing.assert_allclose(pair.nll, -at(log_q, rows.token[:, None])[:, 0])
    told = pair.determined
    assert told.any()
    same = log_p.argmax(axis=1) == log_q.argmax(axis=1)
    np.testing.assert_array_equal(pair.agreement[told], same[told])
    regret = log_p.max(axis=1) - at(log_p, log_q.argmax(axis=1)[:, None])[:, 0]
    np.testing.assert_allclose(pair.regret[told], regret[told], atol=1e-5)
    padding = np.where(needed.ids >= 0, at(log_q, needed.ids), np.nan)
    np.testing.assert_array_equal(compare(rows, needed, padding).kl, pair.kl)


def test_a_tail_that_is_exactly_empty():
    logits = np.array([[5.0, 4.0, -1e6, -1e6, -1e6]])
    log_q = log_softmax(np.array([[5.0, 4.0, 1.0, 1.0, 1.0]]))
    rows = condense(logits, one_row_places(1, 2), top_k=2, tail_samples=2)
    assert rows.tail_mass[0] == 0 and (rows.tail_ids == -1).all()
    got = estimate_kl(rows, at(log_q, rows.top_ids), np.full((1, 2), np.nan))
    p = np.exp(log_softmax(logits))[0]
    want = sum(p[v] * (np.log(p[v]) - log_q[0, v]) for v in (0, 1))
    assert got.kl[0] == pytest.approx(want, abs=1e-6) and got.se[0] == 0


def test_candidate_answers_that_are_no_scores():
    rows = condense(zipf_logits(6, 100, seed=1), one_row_places(6, 100), top_k=8, tail_samples=4)
    needed = needed_ids(rows)
    good = at(log_softmax(zipf_logits(6, 100, seed=1)), needed.ids)
    for value, what in ((np.nan, "no logprob"), (-np.inf, "no logprob"), (0.2, "above 0")):
        bad = good.copy()
        bad[4, 3] = value
        with pytest.raises(ScoreError, match=rf"window 4, position 1: .*{what}.*id {needed.ids[4, 3]}"):
            compare(rows, needed, bad)
    with pytest.raises(ScoreError, match=r"window 0, position 1: .*more than 1"):
        compare(rows, needed, np.full(good.shape, -0.5))
    with pytest.raises(ScoreError, match="shape"):
        compare(rows, needed, good[:, 1:])
    top, tail = look_up(needed.ids, good, rows.top_ids)[0], look_up(needed.ids, good, rows.tail_ids)[0]
    tail[2, 1] = np.nan
    with pytest.raises(ScoreError, match="window 2, position 1"):
        estimate_kl(rows, top, tail)
    for value in (np.nan, np.inf):
        logits = zipf_logits(6, 100, seed=1)
        logits[3, 7] = value
        with pytest.raises(ScoreError, match="window 3, position 1"):
            condense(logits, one_row_places(6, 100))


def test_chosen_tokens_sampled_from_p():
    rng = np.random.default_rng(0)
    log_p = log_softmax(rng.normal(0, 1.5, 30))
    log_q = log_softmax(log_p + rng.normal(0, 0.2, 30))
    exact = float(np.sum(np.exp(log_p) * (log_p - log_q)))
    inside = 0
    for _ in range(100):
        t = rng.choice(30, 500, p=np.exp(log_p))
        terms = chosen_token_terms(log_p[t], log_q[t])
        assert (terms >= 0).all()
        inside += abs(terms.mean() - exact) <= 2 * terms.std(ddof=1) / np.sqrt(500)
    assert 88 <= inside <= 100
    whole = np.sum(np.exp(log_p) * chosen_token_terms(log_p, log_q))
    assert whole == pytest.approx(exact, rel=1e-9)
    with pytest.raises(ScoreError, match="token 1"):
        chosen_token_terms([-1.0, -np.inf], [-1.0, -1.0])
    with pytest.raises(ScoreError):
        chosen_token_terms([-1.0], [-1.0, -1.0])


def test_error_of_a_mean():
    assert mean_standard_error([3.0, 4.0]) == pytest.approx(2.5)
    assert mean_standard_error(np.full(400, 0.1)) == pytest.approx(0.1 / 20)
    with pytest.raises(UsageError):
        mean_standard_error([])
