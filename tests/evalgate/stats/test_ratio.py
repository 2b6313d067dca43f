"""The kernel: spread, skewness and reach against plain loops, and what must hold for any documents."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from evalgate.errors import UsageError
from evalgate.stats.ratio import FEW, MOST_SKEW, figure_skewness, ratio_interval, reach

documents = st.lists(st.tuples(st.floats(-50, 50), st.floats(0.5, 400)), min_size=2, max_size=40)


def slow_variances(totals, sizes):
    """The jackknife's and the pooled variance, document by document."""
    g, size = len(totals), math.fsum(sizes)
    value = math.fsum(totals) / size
    moves = [(math.fsum(totals) - t) / (size - n) - value for t, n in zip(totals, sizes, strict=True)]
    jackknife = (g - 1) / g * math.fsum(m * m for m in moves)
    weights = [n / size for n in sizes]
    concentration = math.fsum(w * w for w in weights)

    def moment(power):
        by = [n**power for n in sizes]
        share = [b / math.fsum(by) for b in by]
        squares = math.fsum(s * (t / n - value) ** 2 for s, t, n in zip(share, totals, sizes, strict=True))
        freedom = 1 - 2 * math.fsum(s * w for s, w in zip(share, weights, strict=True)) + concentration
        return squares / freedom, math.fsum(s / n for s, n in zip(share, sizes, strict=True))

    (one, noise), (half, more) = moment(1), moment(0.5)
    within = min(max((half - one) / (more - noise), 0), one / noise) if more > noise * (1 + 1e-9) else 0
    between = one - within * noise
    return value, jackknife, math.fsum(w * w * (between + within / n) for w, n in zip(weights, sizes, strict=True))


@settings(max_examples=80, deadline=None)
@given(documents)
def test_the_standard_error_is_the_larger_of_two_variances(rows):
    totals, sizes = (np.array(column) for column in zip(*rows, strict=True))
    found = ratio_interval(totals, sizes)
    value, jackknife, pooled = slow_variances(totals.tolist(), sizes.tolist())
    assert found.value == pytest.approx(value, abs=1e-9)
    assert found.se == pytest.approx(math.sqrt(max(jackknife, pooled)), rel=1e-6, abs=1e-9)
    roots = [math.sqrt(n) for n in sizes]
    df = max(math.fsum(roots) ** 2 / math.fsum(sizes) - 1, 1)
    assert found.df == pytest.approx(df)
    assert found.low <= found.value <= found.high


def test_equal_documents_without_skew_give_the_textbook_t_interval():
    means = np.tile([-3.0, -1.0, 0.0, 1.0, 3.0], 5)
    found = ratio_interval(means * 4, np.full(25, 4.0))
    half = scipy_stats.t.ppf(0.975, 24) * means.std(ddof=1) / math.sqrt(25)
    assert (found.low, found.high) == pytest.approx((-half, half))


def test_skewness_is_that_of_the_weighted_mean():
    rng = np.random.default_rng(0)
    sizes = np.full(30, 7.0)
    totals = rng.exponential(size=30) * 7
    residuals = totals - totals.mean()
    own = np.mean(residuals**3) / np.mean(residuals**2) ** 1.5
    assert figure_skewness(residuals, sizes) == pytest.approx(own / math.sqrt(30))
    assert figure_skewness(-residuals, sizes) == pytest.approx(-own / math.sqrt(30))
    assert figure_skewness(np.zeros(30), sizes) == 0
    # One document that carries everything leaves the skewness of that one.
    heavy = np.array([1000.0, *np.full(29, 1e-3)])
    assert abs(figure_skewness(residuals * heavy / 7, heavy)) == pytest.approx(1.0, rel=1e-3)


def test_reach_follows_the_expansion():
    t, z = scipy_stats.t.ppf(0.975, 23), scipy_stats.norm.ppf(0.975)
    bend = (1 + 2 * z * z) / (6 * z)
    short, long = reach(0.95, df=23, skew=0.2, documents=24)
    assert long == pytest.approx(t * (1 + (1 + 16 / math.sqrt(24)) * 0.2 * bend))
    assert short == pytest.approx(t * (1 - 0.4 * 0.2 * bend))
    assert reach(0.95, df=23, skew=-0.2, documents=24) == (long, short)
    assert reach(0.95, df=23, skew=5.0, documents=24)[1] == reach(0.95, df=23, skew=MOST_SKEW, documents=24)[1]
    assert reach(0.95, df=23, skew=5.0, documents=24)[0] == pytest.approx(t / 2)
    few = reach(0.95, df=5, skew=0.0, documents=FEW - 1)
    assert few[0] == few[1] > scipy_stats.t.ppf(0.975, 5)


@given(
    st.floats(0.01, 0.98),
    st.floats(0.001, 0.019),
    st.floats(1, 200),
    st.floats(-2, 2),
    st.integers(2, 300),
)
def test_more_confidence_never_reaches_less_far(confidence, more, df, skew, count):
    near, far = (reach(c, df=df, skew=skew, documents=count) for c in (confidence, confidence + more))
    assert far[0] >= near[0] > 0 and far[1] >= near[1] > 0


@settings(max_examples=60, deadline=None)
@given(documents, st.floats(0.1, 10), st.floats(0.1, 10), st.floats(-5, 5))
def test_units_and_origin_carry_over(rows, scale, stretch, shift):
    totals, sizes = (np.array(column) for column in zip(*rows, strict=True))
    one = ratio_interval(totals, sizes)
    two = ratio_interval((totals * scale + shift * sizes) * stretch, sizes * stretch)
    tolerance = 1e-6 * (1 + abs(one.value) + one.se) * max(scale, 1)
    assert two.low == pytest.approx(one.low * scale + shift, abs=tolerance, rel=1e-6)
    assert two.high == pytest.approx(one.high * scale + shift, abs=tolerance, rel=1e-6)
    mirrored = ratio_interval(-totals, sizes)
    assert (mirrored.low, mirrored.high) == pytest.approx((-one.high, -one.low), rel=1e-9, abs=1e-9)


def test_one_document_of_any_size_is_unknown():
    found = ratio_interval(np.array([3.0, 0.0]), np.array([2.0, 0.0]))
    assert found == (1.5, None, None, None, None)
    with pytest.raises(UsageError, match="confidence"):
        ratio_interval(np.ones(2), np.ones(2), confidence=95)
