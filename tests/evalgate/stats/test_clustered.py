from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from evalgate.errors import MismatchError, ScoreError, UsageError
from evalgate.stats.clustered import clustered_mean, cr1_interval, document_sums, ratio_interval
from evalgate.stats.paired import paired_difference

corpora = st.integers(2, 8).flatmap(
    lambda g: st.lists(
        st.tuples(st.integers(0, g - 1), st.floats(-5, 5), st.integers(1, 4)),
        min_size=2 * g,
        max_size=40,
    )
)


def slow_jackknife(values, documents, sizes):
    """Leave every document out in turn, in plain loops."""
    names = sorted(set(documents))
    total = math.fsum(values) / math.fsum(sizes)
    moves = []
    for name in names:
        rest = [i for i, d in enumerate(documents) if d != name]
        moves.append(math.fsum(values[i] for i in rest) / math.fsum(sizes[i] for i in rest) - total)
    g = len(names)
    return total, math.sqrt((g - 1) / g * math.fsum(m * m for m in moves))


@settings(max_examples=60, deadline=None)
@given(corpora, st.booleans())
def test_mean_and_standard_error_are_those_of_leaving_documents_out(rows, weighted):
    documents = [d for d, _, _ in rows]
    values = [v for _, v, _ in rows]
    sizes = [float(s) if weighted else 1.0 for _, _, s in rows]
    found = clustered_mean(
        np.array(values), np.array(documents), sizes=np.array(sizes) if weighted else None, confidence=0.9
    )
    if len(set(documents)) < 2:
        assert found.low is None and found.high is None and found.se is None
        return
    mean, se = slow_jackknife(values, documents, sizes)
    assert found.value == pytest.approx(mean, abs=1e-9)
    assert found.se == pytest.approx(se, abs=1e-9)
    assert found.n == len(rows) and found.documents == len(set(documents))
    per_document = [math.fsum(s for d, s in zip(documents, sizes, strict=True) if d == k) for k in set(documents)]
    effective = math.fsum(per_document) ** 2 / math.fsum(x * x for x in per_document)
    t = scipy_stats.t.ppf(0.95, max(effective - 1, 1))
    # Never narrower than the t interval; the skewness correction may only widen it.
    assert found.low <= mean - t * se + 1e-9 and found.high >= mean + t * se - 1e-9


def test_symmetric_documents_of_equal_length_give_the_textbook_t_interval():
    means = np.array([-3.0, -1.0, 0.0, 1.0, 3.0])
    found = clustered_mean(np.repeat(means, 4), np.repeat(np.arange(5), 4))
    half = scipy_stats.t.ppf(0.975, 4) * means.std(ddof=1) / math.sqrt(5)
    assert (found.low, found.value, found.high) == pytest.approx((-half, 0.0, half))


def test_skewed_documents_reach_further_on_the_long_side():
    totals = np.array([0.0, 0.1, 0.0, 0.2, 0.1, 0.0, 0.1, 5.0])
    plain = cr1_interval(totals, np.ones(8))
    found = ratio_interval(totals, np.ones(8))
    assert found.high - found.value > 1.3 * (plain.high - plain.value)
    assert found.low == pytest.approx(plain.low)


@given(st.floats(-1e6, 1e6), st.integers(2, 6))
def test_no_variation_gives_an_interval_of_zero_width(value, groups):
    documents = np.repeat(np.arange(groups), range(1, groups + 1))
    found = clustered_mean(np.full(len(documents), value), documents)
    assert (found.low, found.value, found.high, found.se) == (value, value, value, 0.0)


def test_one_document_is_unknown_never_zero():
    found = clustered_mean(np.array([1.0, 2.0, 3.0]), np.zeros(3, dtype=int))
    assert found.value == 2.0
    assert (found.low, found.high, found.se, found.documents) == (None, None, None, 1)


def test_shifting_and_scaling_carry_over():
    rng = np.random.default_rng(3)
    documents = rng.integers(0, 9, 200)
    values = rng.lognormal(size=200)
    a, b = clustered_mean(values, documents), clustered_mean(1e3 - 2 * values, documents)
    assert b.se == pytest.approx(2 * a.se, rel=1e-9)
    assert (b.low, b.high) == pytest.approx((1e3 - 2 * a.high, 1e3 - 2 * a.low), rel=1e-9)


def test_bad_input_is_refused():
    documents = np.zeros(2, dtype=int)
    with pytest.raises(ScoreError, match="no scored positions"):
        clustered_mean(np.array([]), np.array([], dtype=int))
    with pytest.raises(ScoreError, match="value 1 of 2"):
        document_sums(np.array([1.0, np.nan]), documents)
    with pytest.raises(ScoreError, match="same positions"):
        document_sums(np.array([1.0]), documents)
    with pytest.raises(ScoreError, match="sizes"):
        document_sums(np.ones(2), documents, sizes=np.zeros(2))
    with pytest.raises(UsageError, match="confidence"):
        clustered_mean(np.ones(2), documents, confidence=95)
    with pytest.raises(MismatchError, match="3 positions, the other 2"):
        paired_difference(np.ones(3), np.ones(2), documents=np.zeros(3, dtype=int))


def test_pairing_removes_what_both_sides_share():
    rng = np.random.default_rng(0)
    documents = np.repeat(np.arange(20), 30)
    shared = rng.normal(0, 3, 20)[documents]
    reference = shared + rng.normal(0, 0.1, 600)
    candidate = shared + 0.05 + rng.normal(0, 0.1, 600)
    paired = paired_difference(candidate, reference, documents=documents)
    assert paired.se < clustered_mean(candidate, documents).se / 20
    assert paired.low < 0.05 < paired.high


# Coverage. Four corpora with strong correlation inside a document and lengths from 20 to some 800.
# Each draws totals of whole documents [runs, G] exactly as summing position by position would give.


def lengths(rng, shape):
    return np.clip(np.exp(rng.normal(4.5, 0.7, shape)), 20, 800).astype(int)


def ar1(rng, n, rho):
    """Sum of n steps of a stationary AR(1) path with unit variance, step by step; n [..] -> sums [..]."""
    x = rng.normal(size=n.shape)
    total = np.zeros(n.shape)
    for step in range(int(n.max())):
        total += np.where(step < n, x, 0)
        x = rho * x + math.sqrt(1 - rho**2) * rng.normal(size=n.shape)
    return total


def gaussian(rng, shape):
    n = lengths(rng, shape)
    return n * (2 + rng.normal(size=shape)) + np.sqrt(n) * rng.normal(size=shape), n, 2.0, 1.0


def lognormal(rng, shape):
    # value = level of the document * lognormal of the position: KL as it looks.
    n = lengths(rng, shape)
    level = np.exp(rng.normal(0, 0.5, shape))
    inner = n * math.exp(0.5) + np.sqrt(n * (math.e - 1) * math.e) * rng.normal(size=shape)
    return level * inner, n, math.exp(0.125 + 0.5), 0.5


def zero_inflated(rng, shape):
    # flips: a document's own rate, most of them near none.
    n = lengths(rng, shape)
    return rng.binomial(n, rng.beta(1, 19, shape)).astype(float), n, 0.05, 0.05


def heavy_ar(rng, shape):
    # a heavy-tailed level of the document beside a slowly wandering path.
    n = lengths(rng, shape)
    return n * (1 + 0.4 * rng.standard_t(4, shape)) + ar1(rng, n, 0.9), n, 1.0, 1.0


@pytest.mark.parametrize("corpus", [gaussian, lognormal, zero_inflated, heavy_ar])
def test_coverage_of_the_default_interval(corpus):
    rng = np.random.default_rng(2024)
    runs = 1500 if corpus is not heavy_ar else 800
    totals, sizes, truth, spread = corpus(rng, (runs, 80))
    hits, token_hits = 0, 0
    for y, n in zip(totals, sizes, strict=True):
        found = ratio_interval(y, n.astype(float))
        hits += found.low <= truth <= found.high
        # Per-token error: as if every position were drawn on its own, with the spread inside documents alone.
        token_hits += abs(found.value - truth) <= 1.96 * spread / math.sqrt(n.sum())
    assert 0.93 <= hits / runs <= 0.97
    assert token_hits / runs < 0.7


@pytest.mark.parametrize("corpus", [gaussian, heavy_ar])
def test_coverage_with_few_documents(corpus):
    rng = np.random.default_rng(7)
    totals, sizes, truth, _ = corpus(rng, (800, 12))
    found = [ratio_interval(y, n.astype(float)) for y, n in zip(totals, sizes, strict=True)]
    plain = [cr1_interval(y, n.astype(float)) for y, n in zip(totals, sizes, strict=True)]
    coverage = np.mean([i.low <= truth <= i.high for i in found])
    assert 0.93 <= coverage <= 0.975
    assert np.mean([i.low <= truth <= i.high for i in plain]) < coverage
