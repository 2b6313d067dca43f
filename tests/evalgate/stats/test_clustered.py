"""Means over documents: sums, units, and the bound that keeps an interval from having no width."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalgate.errors import ScoreError, UsageError
from evalgate.stats.clustered import clustered_mean, document_sums
from evalgate.stats.rare import Range
from evalgate.stats.ratio import ratio_interval

corpora = st.integers(2, 8).flatmap(
    lambda g: st.lists(
        st.tuples(st.integers(0, g - 1), st.floats(-5, 5), st.integers(1, 4)),
        min_size=2 * g,
        max_size=40,
    )
)
FRACTION = Range((0.0, 1.0))


@settings(max_examples=60, deadline=None)
@given(corpora, st.booleans())
def test_positions_are_added_up_by_document(rows, weighted):
    documents = [d for d, _, _ in rows]
    values = [v for _, v, _ in rows]
    sizes = [float(s) if weighted else 1.0 for _, _, s in rows]
    found = clustered_mean(
        np.array(values), np.array(documents), sizes=np.array(sizes) if weighted else None, confidence=0.9
    )
    assert found.value == pytest.approx(math.fsum(values) / math.fsum(sizes), abs=1e-9)
    assert (found.n, found.documents) == (len(rows), len(set(documents)))
    if len(set(documents)) < 2:
        assert not found.interval.known and found.low is None and found.high is None and found.se is None
        return
    totals, n = (
        np.array(
            [math.fsum(x for x, d in zip(column, documents, strict=True) if d == k) for k in sorted(set(documents))]
        )
        for column in (values, sizes)
    )
    kernel = ratio_interval(totals, n, confidence=0.9)
    assert found.se == pytest.approx(kernel.se, abs=1e-9)
    if not found.alike:
        assert (found.low, found.high) == pytest.approx((kernel.low, kernel.high), abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.sampled_from([0.0, 0.0, 0.0, 0.2, 1.0])), min_size=2, max_size=60),
    st.sampled_from([0.5, 0.95, 0.9999]),
)
def test_a_fraction_has_an_interval_of_some_width_inside_its_range(rows, confidence):
    """Whatever happened in the sample, and if nothing did."""
    sizes = np.array([n for n, _ in rows])
    documents = np.repeat(np.arange(len(rows)), sizes)
    values = np.concatenate([np.arange(n) < round(n * share) for n, share in rows]).astype(float)
    for outcomes in (values, 1 - values):
        found = clustered_mean(outcomes, documents, reach=FRACTION, confidence=confidence)
        assert 0 <= found.low <= found.value <= found.high <= 1
        assert found.high - found.low > 1e-6


@pytest.mark.parametrize("groups", [2, 3, 24, 400])
def test_nothing_happened_is_the_exact_binomial_limit(groups):
    documents = np.repeat(np.arange(groups), 10)
    found = clustered_mean(np.ones(groups * 10), documents, reach=FRACTION)
    assert (found.low, found.high) == (pytest.approx(0.025 ** (1 / groups)), 1.0)
    assert found.alike and found.interval.method == "clustered-t, hoeffding"


def test_without_a_range_an_end_that_nothing_bounds_is_open():
    documents = np.repeat(np.arange(30), 4)
    kl = clustered_mean(np.zeros(120), documents, reach=Range((0.0, math.inf)))
    assert (kl.low, kl.value, kl.high) == (0.0, 0.0, None) and kl.interval.known
    nll = clustered_mean(np.zeros(120), documents)
    assert (nll.low, nll.value, nll.high) == (None, 0.0, None) and nll.interval.known
    few = np.where(documents < 4, 1.0, 0.0)
    assert clustered_mean(few, documents, reach=Range((0.0, math.inf))).high is None
    assert clustered_mean(np.where(documents < 5, 1.0, 0.0), documents).high is not None


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
