"""Intervals of documents that show no spread, and the interval a limit is held against."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from evalgate.core import Limits
from evalgate.errors import UsageError
from evalgate.metrics import Series, Statistic, mean
from evalgate.stats.clustered import clustered_mean
from evalgate.stats.intervals import Sample
from evalgate.stats.percentiles import Percentiles
from evalgate.stats.rare import RareEvents, alike, alike_interval, hoeffding_interval
from evalgate.stats.ratio import ratio_interval


def slow_coin(p, q):
    total = 0.0
    for a, b in ((p, q), (1 - p, 1 - q)):
        if a > 0:
            total += a * math.log(a / b)
    return total


@given(p=st.floats(0, 1), n=st.integers(1, 2000), confidence=st.floats(0.5, 0.999))
def test_hoeffding_ends_are_where_the_chernoff_bound_reaches_the_error_rate(p, n, confidence):
    low, high = hoeffding_interval(p, n, confidence=confidence)
    assert 0 <= low <= p <= high <= 1
    tail = (1 - confidence) / 2
    for end in (low, high):
        if 1e-9 < end < 1 - 1e-9 and abs(end - p) > 1e-9:
            assert math.exp(-n * slow_coin(p, end)) == pytest.approx(tail, rel=1e-6)


def test_without_an_event_it_is_the_exact_binomial_limit():
    for n in (1, 10, 64, 400):
        low, high = hoeffding_interval(0.0, n, confidence=0.95)
        assert low == 0
        assert binom.cdf(0, n, high) == pytest.approx(0.025)


def test_it_covers_coins_at_least_as_often_as_it_says():
    for n, p in ((20, 0.05), (40, 0.02), (64, 0.5)):
        k = np.arange(n + 1)
        covered = [low <= p <= high for low, high in (hoeffding_interval(i / n, n, confidence=0.9) for i in k)]
        assert (binom.pmf(k, n, p) * covered).sum() >= 0.9


def test_only_documents_that_show_no_spread_are_alike():
    sizes = np.full(20, 10.0)
    same = alike(0.3 * sizes, sizes)
    assert same is not None and (same.value, same.differing, same.effective) == (pytest.approx(0.3), 0, 20)
    few = 0.3 * sizes
    few[:4] += 1
    assert alike(few, sizes).differing == 4
    few[4] += 1
    assert alike(few, sizes) is None
    assert alike(np.array([1.0, 2.0]), np.ones(2)) is None
    assert alike(np.random.default_rng(0).random(20), np.ones(20)) is None
    third = 1 / 3
    assert alike(np.array([third * 7, third * 3, third * 11]), np.array([7.0, 3.0, 11.0])).differing == 0


def test_an_interval_in_both_directions_shares_the_error_rate():
    group = alike(np.zeros(50), np.ones(50))
    one = alike_interval(group, below=0.0, above=1.0, confidence=0.95)
    both = alike_interval(group, below=1.0, above=1.0, confidence=0.95)
    assert one == pytest.approx((0, 1 - 0.025 ** (1 / 50)))
    assert both == pytest.approx((-(1 - 0.0125 ** (1 / 50)), 1 - 0.0125 ** (1 / 50)))
    assert alike_interval(group, below=0.0, above=math.inf, confidence=0.95) == (0, math.inf)
    with pytest.raises(UsageError, match="range"):
        alike_interval(group, below=-1.0, above=1.0, confidence=0.95)


def figure(values, limits, *, statistic=None, support=(0.0, math.inf), clip=None, confidence=0.95):
    """The figure of values, 5 to a document, that a gate holds against the limits."""
    values = np.asarray(values, dtype=np.float64)
    sample = Sample(Series(values), np.arange(len(values)) // 5, support=support)
    return sample.figure(statistic or mean(), confidence=confidence, rare=RareEvents(limits, clip))


def test_with_a_spread_it_is_the_summary_s_interval():
    rng = np.random.default_rng(1)
    values = rng.exponential(0.01, 200)
    documents = np.arange(200) // 5
    found = figure(values, Limits(None, 0.02), confidence=0.9)
    wanted = clustered_mean(values, documents, confidence=0.9)
    assert (found.value, found.low, found.high) == (wanted.value, max(wanted.low, 0), wanted.high)
    p99 = Statistic("p99", "percentile", level=99)
    found = figure(values, Limits(None, 0.1), statistic=p99)
    wanted = Percentiles.of(values, documents).figure(99)
    assert (found.value, found.low, found.high) == (wanted.value, wanted.low, wanted.high)
    rms = Statistic("rms", scale="sqrt")
    found = figure(values, Limits(None, 0.5), statistic=rms, confidence=0.9)
    assert found.value == pytest.approx(math.sqrt(values.mean()))


@pytest.mark.parametrize("documents", [10, 35, 36, 400])
def test_zero_everywhere_passes_only_with_enough_documents(documents):
    # A range without end: one document counts as at most 10 limits, so that 1 - 0.025^(1/G) must be at most 1/10.
    found = figure(np.zeros(documents * 5), Limits(None, 0.01))
    assert found.low == 0 and found.alike
    assert found.high == pytest.approx(10 * 0.01 * (1 - 0.025 ** (1 / documents)))
    assert (found.high <= 0.01) == (documents >= 36)


def test_a_metric_with_a_range_is_held_to_it_unless_a_clip_is_given():
    found = figure(np.ones(320), Limits(0.97, None), support=(0.0, 1.0))
    assert found.low == pytest.approx(0.025 ** (1 / 64))
    clipped = figure(np.ones(320), Limits(0.97, None), support=(0.0, 1.0), clip=10.0)
    assert clipped.low == pytest.approx(1 - 0.3 * (1 - 0.025 ** (1 / 64)))
    assert (found.high, clipped.high) == (1.0, 1.0)


def test_a_rare_breakdown_keeps_the_error_rate_where_a_clustered_interval_does_not():
    """Every position of a document flips or none does; the true rate is a hair above the limit."""
    rng = np.random.default_rng(2)
    limit, rate, wrong, naive = 0.02, 0.021, 0, 0
    for _ in range(400):
        flips = np.repeat(rng.random(40) < rate, 5).astype(float)
        found = figure(flips, Limits(None, limit), support=(0.0, 1.0))
        wrong += found.high <= limit
        naive += ratio_interval(flips.reshape(40, 5).sum(axis=1), np.full(40, 5.0)).high <= limit
    assert wrong / 400 <= 0.025
    assert naive / 400 > 0.3


def test_percentiles_without_spread_rest_on_the_share_beyond_the_limit():
    p99 = Statistic("p99", "percentile", level=99)

    def high(documents, clip=None):
        return figure(np.zeros(documents * 5), Limits(None, 0.1), statistic=p99, clip=clip).high

    assert high(64) is None
    assert high(366) is None and high(368) == 0
    assert high(35, clip=10) is None and high(37, clip=10) == 0
    failing = figure(np.full(100, 5.0), Limits(None, 0.1), statistic=p99)
    assert failing.low == 5.0
    floor = Statistic("p5", "percentile", level=5)
    above = figure(np.full(2000, 5.0), Limits(1.0, None), statistic=floor)
    assert above.low == 5.0


def test_estimates_bring_their_own_errors():
    rng = np.random.default_rng(4)
    values, se = rng.exponential(0.01, 200), np.full(200, 0.02)
    documents = np.arange(200) // 5
    p90 = Statistic("p90", "percentile", level=90)
    sample, rare = Sample(Series(values, se=se), documents), RareEvents(Limits(None, 0.1))
    found = sample.figure(p90, rare=rare)
    wanted = Percentiles.of(values, documents, se=se).figure(90)
    assert (found.value, found.low, found.high) == pytest.approx((wanted.value, wanted.low, wanted.high))
    found = sample.figure(mean(), rare=rare)
    own = 0.02 / math.sqrt(200)
    plain = clustered_mean(values, documents)
    assert found.high == pytest.approx(max(plain.high, values.mean() + 1.96 * own), rel=1e-3)


def test_one_document_has_no_interval():
    for statistic in (mean(), Statistic("p99", "percentile", level=99)):
        found = figure(np.zeros(5), Limits(None, 1.0), statistic=statistic)
        assert (found.value, found.low, found.high) == (0.0, None, None)


def test_constant_perplexity_is_clipped_on_the_log_scale():
    exp = Statistic("ratio", scale="exp")
    found = figure(np.zeros(500), Limits(None, 1.05), statistic=exp, support=(-math.inf, math.inf))
    assert found.value == 1.0
    assert math.log(found.high) == pytest.approx(10 * math.log(1.05) * (1 - 0.0125 ** (1 / 100)))
    assert math.log(found.low) == pytest.approx(-math.log(found.high))
