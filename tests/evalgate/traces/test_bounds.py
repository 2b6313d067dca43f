from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalgate.errors import ScoreError, UsageError
from evalgate.traces import (
    Shared,
    TopList,
    agreement,
    js_interval,
    kl_lower,
    shared_ids,
    top1,
    topk_overlap,
    tv_interval,
)
from evalgate.traces.condense import top_order
from tests.evalgate.trace_samples import log_softmax, slow_js, slow_kl, slow_tv
from tests.evalgate.traces.rounded_pairs import violations

KINDS = ("peaked", "flat", "alike", "disjoint", "zipf")


def pairs(n: int, vocabulary: int, kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    a = rng.normal(0, {"peaked": 12, "flat": 0.05, "alike": 3, "disjoint": 1, "zipf": 1}[kind], (n, vocabulary))
    if kind == "zipf":
        a = a - 2 * np.log(1 + rng.permuted(np.tile(np.arange(vocabulary), (n, 1)), axis=1))
    b = a + rng.normal(0, 0.05, a.shape) if kind in ("alike", "zipf") else rng.permuted(a, axis=1)
    if kind == "disjoint":  # each side's own half, the other all but impossible
        half = np.arange(vocabulary) < vocabulary // 2
        a, b = a - 60 * half, b - 60 * ~half
    return log_softmax(a), log_softmax(b)


def known_flags(n: int, vocabulary: int, k: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.permuted(np.tile(np.arange(vocabulary) < k, (n, 1)), axis=1)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_values_lie_inside_10_000_random_intervals(kind):
    for vocabulary, k in ((40, 0), (40, 1), (40, 8), (60, 40), (40, 40)):
        log_p, log_q = pairs(400, vocabulary, kind, seed=k)
        shared = Shared(log_p, log_q, known_flags(400, vocabulary, k, seed=k))
        shared.check()
        assert (kl_lower(shared) <= slow_kl(log_p, log_q) + 1e-9).all()
        for interval, exact in (
            (tv_interval(shared), slow_tv(log_p, log_q)),
            (js_interval(shared), slow_js(log_p, log_q)),
        ):
            assert (interval.low <= exact + 1e-12).all()
            assert (interval.high >= exact - 1e-12).all()
            assert (interval.low >= 0).all()
        if k == vocabulary:
            np.testing.assert_allclose(kl_lower(shared, slack=1e-12), slow_kl(log_p, log_q), rtol=1e-9, atol=1e-10)
            np.testing.assert_allclose(tv_interval(shared, slack=0).low, slow_tv(log_p, log_q), atol=1e-12)
            np.testing.assert_allclose(js_interval(shared, slack=0).high, slow_js(log_p, log_q), atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_logprobs_do_not_break_a_bound(kind):
    log_p, log_q = pairs(300, 60, kind, seed=5)
    small = [v.astype(np.float32).astype(np.float64) for v in (log_p, log_q)]
    for k in (10, 59, 60):
        shared = Shared(*small, known_flags(300, 60, k, seed=k))
        assert (kl_lower(shared) <= slow_kl(log_p, log_q) * (1 + 1e-6) + 1e-6).all()
        assert (tv_interval(shared).high >= slow_tv(log_p, log_q) - 1e-6).all()


def test_rounded_logprobs_do_not_break_a_bound():
    """KL 1e-4, which the rounding of coarse grids exceeds; benchmarks/bounds.py has 100,000 positions."""
    for grid, found in violations(1500, kl=1e-4, k=20, seed=3).items():
        assert (found.positions, found.kl, found.tv, found.js) == (1500, 0, 0, 0), grid
        assert 0 < found.kl_low < 1e-4
        assert found.kl_uncounted > 0 or grid in ("6 decimals", "5 decimals")


@pytest.mark.parametrize("kind", KINDS)
def test_without_doubt_every_end_keeps_its_bits(kind):
    log_p, log_q = pairs(200, 40, kind, seed=11)
    known = known_flags(200, 40, 12, seed=11)
    zeros = np.zeros(log_p.shape)
    plain, doubted = Shared(log_p, log_q, known), Shared(log_p, log_q, known, zeros, zeros)
    assert (kl_lower(plain) == kl_lower(doubted)).all()
    for one, two in ((f(plain), f(doubted)) for f in (tv_interval, js_interval)):
        assert (one.low == two.low).all() and (one.high == two.high).all()


@given(st.integers(0, 10**6), st.sampled_from(KINDS), st.floats(1e-6, 0.3), st.booleans())
@settings(max_examples=40, deadline=None)
def test_ends_hold_for_every_pair_within_the_doubt(seed, kind, most, one_side):
    """Printed values anywhere within their doubt, each id with its own, also where one side alone rounds."""
    log_p, log_q = pairs(20, 30, kind, seed)
    rng = np.random.default_rng(seed)
    off_p, off_q = (most * rng.random(log_p.shape) for _ in range(2))
    off_q = None if one_side else off_q
    p = log_p + off_p * rng.choice([-1, -0.5, 1], log_p.shape)
    q = log_q if off_q is None else log_q + off_q * rng.choice([-1, 0.5, 1], log_q.shape)
    shared = Shared(p, q, known_flags(20, 30, int(rng.integers(0, 31)), seed), off_p, off_q)
    assert (kl_lower(shared) <= slow_kl(log_p, log_q) + 1e-9).all()
    tv, js = tv_interval(shared), js_interval(shared)
    assert ((tv.low <= slow_tv(log_p, log_q) + 1e-9) & (slow_tv(log_p, log_q) <= tv.high + 1e-9)).all()
    assert ((js.low <= slow_js(log_p, log_q) + 1e-9) & (slow_js(log_p, log_q) <= js.high + 1e-9)).all()


@given(st.integers(0, 10**6), st.sampled_from(KINDS), st.integers(2, 30))
@settings(max_examples=60, deadline=None)
def test_bounds_narrow_with_every_id(seed, kind, vocabulary):
    log_p, log_q = pairs(3, vocabulary, kind, seed)
    order = np.random.default_rng(seed).permutation(vocabulary)
    before = None
    for k in range(vocabulary + 1):
        known = np.zeros((3, vocabulary), bool)
        known[:, order[:k]] = True
        shared = Shared(log_p, log_q, known)
        kl = kl_lower(shared, slack=1e-12)
        tv, js = tv_interval(shared, slack=1e-12), js_interval(shared, slack=1e-12)
        now = np.array([kl, tv.low, js.low, -tv.high, -js.high])
        if before is not None:
            # the tail masses are 1 minus a sum: rounding moves a tiny one by 1e-7 of itself, and its bound by 1e-6
            assert (now >= before - 1e-6).all()
        before = now
        assert (kl >= 0).all()


@given(st.integers(0, 10**6), st.sampled_from(KINDS))
@settings(max_examples=40, deadline=None)
def test_the_order_of_ids_does_not_matter(seed, kind):
    log_p, log_q = pairs(4, 20, kind, seed)
    known = known_flags(4, 20, 7, seed)
    mixed = np.random.default_rng(seed).permutation(20)
    a, b = Shared(log_p, log_q, known), Shared(log_p[:, mixed], log_q[:, mixed], known[:, mixed])
    np.testing.assert_allclose(kl_lower(a), kl_lower(b), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(tv_interval(a).high, tv_interval(b).high, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(js_interval(a).low, js_interval(b).low, rtol=1e-9, atol=1e-12)


def test_probability_zero():
    half = np.log(0.5)
    p, q = np.array([[half, half, -np.inf]]), np.array([[half, -np.inf, half]])
    shared = Shared(p, q, np.ones((1, 3), bool))
    assert np.isposinf(kl_lower(shared)).all()
    np.testing.assert_allclose(tv_interval(shared, slack=0).low, [0.5])
    np.testing.assert_allclose(js_interval(shared, slack=0).low, slow_js(p, q))
    other = Shared(np.array([[0.0, -np.inf]]), np.array([[half, half]]), np.ones((1, 2), bool))
    np.testing.assert_allclose(kl_lower(other), [-half], atol=1e-5)


def test_what_is_no_distribution_is_refused():
    good = np.log(np.full((2, 2), 0.5))
    for wrong in (np.nan, 0.3, -0.1):
        bad = good.copy()
        bad[1, 0] = wrong
        with pytest.raises(ScoreError, match="row 1: the candidate"):
            Shared(good, bad, np.ones((2, 2), bool)).check()
        Shared(good, bad, np.array([[True, True], [False, True]])).check()


def top_list(log_p: np.ndarray, k: int, **options) -> TopList:
    ids = np.array([top_order(row, k) for row in log_p])
    return TopList(ids, np.take_along_axis(log_p, ids, axis=1), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_two_top_lists(kind):
    log_p, log_q = pairs(300, 50, kind, seed=9)
    p, q = top_list(log_p, 12), top_list(log_q, 15)
    shared = shared_ids(p, q)
    for row in range(300):
        both = set(p.ids[row]) & set(q.ids[row])
        assert set(p.ids[row][shared.known[row]]) == both
        for at in np.flatnonzero(shared.known[row]):
            assert shared.log_q[row, at] == log_q[row, p.ids[row, at]]
    assert (kl_lower(shared) <= slow_kl(log_p, log_q) + 1e-9).all()
    assert (tv_interval(shared).high >= slow_tv(log_p, log_q) - 1e-12).all()
    found = topk_overlap(p, q, k=10)
    same = agreement(p, q)
    assert found.determined.all() and same.determined.all() and not found.unknown
    for row in range(300):
        a, b = set(top_order(log_p[row], 10)), set(top_order(log_q[row], 10))
        assert found.values[row] == len(a & b) / 10
        assert same.values[row] == (log_p[row].argmax() == log_q[row].argmax())


def test_padding_is_no_id():
    p = TopList(np.array([[3, 1, -1]]), np.array([[-0.5, -1.5, np.nan]]))
    q = TopList(np.array([[1, -1, -1]]), np.array([[-0.4, np.nan, np.nan]]))
    shared = shared_ids(p, q)
    assert shared.known.tolist() == [[False, True, False]]
    assert top1(p).ids.tolist() == [3] and top1(q).ids.tolist() == [1]
    assert np.isfinite(tv_interval(shared).high).all()


def test_a_tie_at_the_cut_is_unknown():
    even = np.log(np.full((1, 2), 0.2))
    ids = np.array([[7, 4]])
    assert top1(TopList(ids, even)).ids.tolist() == [4]
    assert not top1(TopList(ids, even)).determined.any()  # 0.6 is left: a third id may tie
    assert top1(TopList(ids, even, by_id=True)).determined.all()
    assert top1(TopList(ids, np.log(np.full((1, 2), 0.4)))).determined.all()  # 0.2 is left: none can
    assert agreement(TopList(ids, even), TopList(ids, even)).unknown == 1
    three = TopList(np.array([[7, 4, 5]]), np.log([[0.3, 0.2, 0.2]]))
    assert topk_overlap(three, three, k=2).unknown == 1
    assert topk_overlap(three, three, k=1).unknown == 0
    cut = TopList(np.array([[7, 4, 5]]), np.log([[0.3, 0.2, 0.2]]), by_id=True)
    assert topk_overlap(cut, cut, k=2).values.tolist() == [1.0] and topk_overlap(cut, cut, k=2).unknown == 0


def test_ids_asked_for_by_name_are_no_top_list():
    named = TopList(np.array([[2, 9]]), np.log([[0.5, 0.1]]), contiguous=False)
    assert top1(named).ids.tolist() == [2] and top1(named).determined.all()  # 0.4 is left
    weak = TopList(np.array([[2, 9]]), np.log([[0.3, 0.1]]), contiguous=False)
    assert not top1(weak).determined.any()  # an id with up to 0.6 may be elsewhere
    with pytest.raises(UsageError, match="overlap of 2"):
        topk_overlap(named, named, k=2)
