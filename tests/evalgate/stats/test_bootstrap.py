from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalgate.errors import ScoreError, UsageError
from evalgate.stats import bootstrap, ordered
from evalgate.stats.bootstrap import DocumentBootstrap, Percentiles, correlation
from evalgate.stats.clustered import clustered_mean

LEVELS = (0.1, 1, 50, 90, 99.9)


def slow_percentiles(values, codes, counts, levels):
    """Build every resample and ask numpy."""
    return np.array([np.percentile(np.repeat(values, row[codes]), levels) for row in counts])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 7), st.integers(1, 60), st.integers(0, 10**6), st.booleans())
def test_percentiles_are_those_of_the_resamples_built_out(groups, n, seed, ties):
    rng = np.random.default_rng(seed)
    documents = rng.integers(0, groups, n) * 3
    values = rng.integers(0, 4, n).astype(float) if ties else rng.normal(size=n)
    drawn = DocumentBootstrap.of(documents, seed=seed, resamples=9)
    counts = np.concatenate(list(drawn.counts()))
    assert counts.shape == (9, drawn.groups) and (counts.sum(axis=1) == drawn.groups).all()
    np.testing.assert_allclose(
        drawn.percentiles(values, LEVELS), slow_percentiles(values, drawn.codes, counts, LEVELS), atol=1e-12
    )
    np.testing.assert_allclose(
        drawn.sums(values[:, None])[:, 0], [(row[drawn.codes] * values).sum() for row in counts], atol=1e-9
    )


def test_small_chunks_give_the_same_figures(monkeypatch):
    rng = np.random.default_rng(0)
    values, documents = rng.lognormal(size=3000), rng.integers(0, 40, 3000)
    drawn = DocumentBootstrap.of(documents, seed=5, resamples=50)
    counts = np.concatenate(list(drawn.counts()))
    monkeypatch.setattr(bootstrap, "CHUNK_CELLS", 700)
    monkeypatch.setattr(ordered, "CHUNK_CELLS", 700)
    np.testing.assert_allclose(np.concatenate(list(drawn.counts())).sum(axis=0).sum(), counts.sum(axis=0).sum())
    small = np.concatenate(list(drawn.counts()))
    np.testing.assert_allclose(
        drawn.percentiles(values, LEVELS), slow_percentiles(values, drawn.codes, small, LEVELS), atol=1e-12
    )


def percentile_figures(values, drawn, *, levels, se=None, exactness="exact"):
    found = Percentiles(values, drawn, tuple(levels), se)
    return [found.figure(level, exactness=exactness) for level in levels]


def test_estimates_are_seeded_and_hold_their_value():
    rng = np.random.default_rng(1)
    values, documents = rng.lognormal(size=500), rng.integers(0, 25, 500)
    a, b, c = (percentile_figures(values, DocumentBootstrap.of(documents, seed=s), levels=LEVELS) for s in (3, 3, 4))
    assert a == b != c
    for estimate, expected in zip(a, np.percentile(values, LEVELS), strict=True):
        assert estimate.value == expected
        assert estimate.low <= estimate.value <= estimate.high
        assert (estimate.n, estimate.documents, estimate.interval.method) == (500, 25, "document-bootstrap")


def test_noise_of_estimated_values_widens_the_interval():
    rng = np.random.default_rng(1)
    values, documents = rng.lognormal(size=500), rng.integers(0, 25, 500)
    drawn = DocumentBootstrap.of(documents, seed=0)
    (exact,) = percentile_figures(values, drawn, levels=[90])
    (noisy,) = percentile_figures(values, drawn, levels=[90], se=np.full(500, 0.5), exactness="estimated")
    assert noisy.exactness == "estimated" and noisy.value == exact.value
    assert (noisy.low, noisy.high) == pytest.approx((exact.low - 0.5, exact.high + 0.5))


def test_one_document_is_unknown():
    drawn = DocumentBootstrap.of(np.full(5, 2), seed=0)
    (found,) = percentile_figures(np.arange(5.0), drawn, levels=[50])
    assert (found.value, found.low, found.high, found.se) == (2.0, None, None, None)
    found = correlation(np.arange(5.0), np.arange(5.0) ** 2, drawn)
    assert found is not None and found.low is None


def test_correlation_is_numpys_and_undefined_for_a_constant():
    rng = np.random.default_rng(2)
    x = rng.normal(size=400)
    y = x + rng.normal(size=400)
    documents = rng.integers(0, 20, 400)
    drawn = DocumentBootstrap.of(documents, seed=1)
    found = correlation(x + 1e4, y * 1e3, drawn)
    assert found is not None
    assert found.value == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-9)
    counts = np.concatenate(list(drawn.counts()))
    slow = [np.corrcoef(np.repeat(x, r[drawn.codes]), np.repeat(y, r[drawn.codes]))[0, 1] for r in counts]
    assert found.se == pytest.approx(np.std(slow, ddof=1), rel=1e-6)
    assert found.low < found.value < found.high
    assert correlation(np.ones(400), y, drawn) is None


def test_bad_input_is_refused():
    drawn = DocumentBootstrap.of(np.arange(3), seed=0)
    with pytest.raises(UsageError, match="between 0 and 100"):
        percentile_figures(np.arange(3.0), drawn, levels=[100])
    with pytest.raises(UsageError, match="at least 2 resamples"):
        DocumentBootstrap.of(np.arange(3), seed=0, resamples=1)
    with pytest.raises(ScoreError, match="no scored positions"):
        DocumentBootstrap.of(np.arange(0), seed=0)


def test_resamples_are_of_documents_not_of_positions():
    rng = np.random.default_rng(0)
    values, documents = rng.lognormal(size=10**6), np.sort(rng.integers(0, 1000, 10**6))
    tracemalloc.start()
    percentile_figures(values, DocumentBootstrap.of(documents, seed=0), levels=LEVELS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1000 * 10**6 / 4  # bytes; resamples of positions would be 1000 x a million numbers


def test_coverage_of_percentiles_over_correlated_documents():
    rng = np.random.default_rng(11)
    levels, runs, groups = (50, 90, 99), 200, 80
    # value = level of the document + noise of the position, both of sd 0.7, so that percentiles are known.
    # Percentile intervals follow any monotone transform, so this speaks for lognormal values too.
    truth = np.array([0.0, 1.2815515655446004, 2.3263478740408408]) * np.sqrt(0.98)
    hits, plain_hits, token_hits = np.zeros(3), np.zeros(3), np.zeros(3)
    for run in range(runs):
        n = np.clip(np.exp(rng.normal(3.5, 0.6, groups)), 8, 200).astype(int)
        documents = np.repeat(np.arange(groups), n)
        values = rng.normal(0, 0.7, groups)[documents] + rng.normal(0, 0.7, len(documents))
        drawn = DocumentBootstrap.of(documents, seed=run, resamples=200)
        found = percentile_figures(values, drawn, levels=levels)
        hits += [e.low <= t <= e.high for e, t in zip(found, truth, strict=True)]
        plain = np.quantile(drawn.percentiles(values, levels), [0.025, 0.975], axis=0)
        plain_hits += (plain[0] <= truth) & (truth <= plain[1])
        # Binomial order-statistic interval that takes every position as its own draw.
        share = np.array(levels) / 100
        half = 1.96 * np.sqrt(share * (1 - share) / len(values))
        token_hits += (np.quantile(values, share - half) <= truth) & (truth <= np.quantile(values, share + half))
    assert ((hits / runs >= 0.93) & (hits / runs <= 0.98)).all(), hits / runs
    assert plain_hits[2] / runs < 0.9
    assert (token_hits / runs < 0.75).all(), token_hits / runs


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(6, 40), st.integers(0, 10**6), st.sampled_from([0.1, 0.5, 0.9]))
def test_inverted_limits_are_those_of_trying_every_value(groups, n, seed, share):
    rng = np.random.default_rng(seed)
    codes = np.concatenate([np.arange(groups), rng.integers(0, groups, n)])
    values = rng.integers(0, 12, len(codes)).astype(float)
    found = ordered.OrderedValues.of(values, codes, groups=groups).limits(share, confidence=0.9)
    inside = []
    for x in np.unique(values):
        at_most = clustered_mean((values <= x).astype(float), codes, confidence=0.9)
        below = clustered_mean((values < x).astype(float), codes, confidence=0.9)
        if at_most.high >= share and below.low <= share:
            inside.append(x)
    # The search takes the acceptance region as an interval, so it finds ends of it.
    assert found[0] in inside or found[0] == values.max()
    assert found[1] in inside or found[1] == found[0]
