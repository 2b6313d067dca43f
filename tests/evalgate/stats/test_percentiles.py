from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalgate.core import Limits
from evalgate.errors import ScoreError, UsageError
from evalgate.stats import ordered
from evalgate.stats.ordered import OrderedValues, interpolated, percentile_end
from evalgate.stats.percentiles import Percentiles
from evalgate.stats.rare import FEW, UNBOUNDED, Range, RareEvents, alike, alike_interval
from evalgate.stats.ratio import ratio_interval


def slow_ends(values, codes, share, confidence):
    """Try every value: the nearest one on each side beyond which surely too little lies; None = open."""
    units = sorted(set(codes.tolist()))
    sizes = np.array([(codes == u).sum() for u in units], dtype=float)
    least = min(FEW, len(units))

    def surely_less(beyond, allowed):
        counts = np.array([beyond[codes == u].sum() for u in units], dtype=float)
        if np.count_nonzero(counts) >= least:
            near = np.count_nonzero(sizes - counts) >= least
            return bool(near and ratio_interval(counts, sizes, confidence=confidence).high < allowed)
        group = alike(counts, sizes)
        if group is None:
            return False
        return alike_interval(group, below=0.0, above=1 - group.value, confidence=confidence)[1] < allowed

    tried = np.unique(values)
    low = [x for x in tried if surely_less(values < x, share)]
    high = [x for x in tried if surely_less(values > x, 1 - share)]
    return (max(low) if low else None), (min(high) if high else None)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 30), st.integers(1, 12), st.integers(0, 10**6), st.sampled_from([0.05, 0.5, 0.9]), st.booleans())
def test_ends_are_those_of_trying_every_value(groups, per, seed, share, ties):
    rng = np.random.default_rng(seed)
    codes = np.concatenate([np.arange(groups), rng.integers(0, groups, groups * per)])
    values = rng.integers(0, 12, len(codes)).astype(float) if ties else rng.normal(size=len(codes))
    found = OrderedValues.of(values, codes)
    low, high = slow_ends(values, codes, share, 0.9)
    ends = [
        percentile_end(found, side, allowed, confidence=0.9, reach=UNBOUNDED).value
        for side, allowed in (("below", share), ("above", 1 - share))
    ]
    # The search takes what is sure as a run of values, so it may end further out than the slow way, never nearer.
    for mine, slow, sign in ((ends[0], low, -1), (ends[1], high, 1)):
        if mine is not None:
            assert slow is not None and sign * (mine - slow) >= 0
    if not ties and groups >= 12:
        assert (ends[0] is None) == (low is None) and (ends[1] is None) == (high is None)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=70),
    st.sampled_from([0.1, 1, 5, 10, 25, 33.3, 50, 75, 90, 95, 99, 99.9]),
)
def test_percentiles_of_sorted_values_are_numpys_to_the_last_bit(values, level):
    assert interpolated(np.sort(np.array(values)), level) == np.percentile(np.array(values), level)


def test_zeros_have_no_sign_and_no_order():
    """Sorting is not stable, and differs between processors where values are equal."""
    values = np.array([-0.0, 0.0] * 40 + [1.0, -1.0])
    found = OrderedValues.of(values, np.arange(82) % 3)
    assert not np.signbit(found.values[1:]).any()
    assert found.beyond(0.0, "below").sum() == found.beyond(0.0, "above").sum() == 1


@pytest.mark.parametrize(("most", "least"), [(13, 1), (2048, 1), (2048, 256)])
def test_blocks_do_not_change_the_counts(monkeypatch, most, least):
    rng = np.random.default_rng(0)
    values, codes = rng.integers(0, 300, 2000).astype(float), rng.integers(0, 7, 2000) * 2
    monkeypatch.setattr(ordered, "_MAX_BLOCKS", most)
    monkeypatch.setattr(ordered, "_LEAST_WIDTH", least)
    found = OrderedValues.of(values, codes)
    for value in (-1.0, 0.0, 5.0, 150.0, 299.0, 400.0):
        for side, beyond in (("below", values < value), ("above", values > value)):
            expected = [beyond[codes == u].sum() for u in np.unique(codes)]
            assert found.beyond(value, side).tolist() == expected


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 40), st.integers(0, 10**6), st.sampled_from([0.1, 1.0, 50.0, 99.0, 99.9]))
def test_an_interval_holds_its_figure_and_widens_with_confidence(groups, seed, level):
    rng = np.random.default_rng(seed)
    documents = np.repeat(np.arange(groups), rng.integers(1, 40, groups))
    values = rng.lognormal(size=len(documents))
    percentiles = Percentiles.of(values, documents)
    one, two = (percentiles.figure(level, confidence=c) for c in (0.9, 0.99))
    assert one.value == np.percentile(values, level)
    for end in ("low", "high"):
        inner, outer = getattr(one, end), getattr(two, end)
        if inner is None:
            assert outer is None
        elif outer is not None:
            assert abs(outer - one.value) >= abs(inner - one.value)
    assert one.low is None or one.low <= one.value
    assert one.high is None or one.high >= one.value
    assert (one.se is None) == (one.low is None or one.high is None)


def test_an_end_past_the_last_documents_is_open():
    rng = np.random.default_rng(1)
    documents = np.repeat(np.arange(20), 100)
    percentiles = Percentiles.of(rng.lognormal(size=2000), documents)
    high = percentiles.figure(99.9)
    assert (high.low is not None, high.high, high.se) == (True, None, None)
    low = percentiles.figure(0.1)
    assert (low.low, low.high is not None) == (None, True)
    middle = percentiles.figure(50)
    assert middle.interval.closed and middle.interval.method == "test-inversion"
    assert Limits(None, 1e9).verdict(high.interval) == "undecided"


def test_few_documents_cannot_say_where_a_tail_ends():
    """Four of 20 documents reach beyond 1: not the 90th percentile's end. With 40 a bound for any spread can tell."""
    values = np.zeros((20, 10))
    values[:4] = np.arange(40).reshape(4, 10) + 1.0
    found = Percentiles.of(values.ravel(), np.repeat(np.arange(20), 10)).figure(90)
    assert found.high is None
    many = np.concatenate([values, np.zeros((20, 10))])
    found = Percentiles.of(many.ravel(), np.repeat(np.arange(40), 10)).figure(90)
    assert found.high is not None and found.alike


@pytest.mark.parametrize(("documents", "clip", "sure"), [(367, None, False), (368, None, True), (36, 10.0, True)])
def test_what_is_the_same_everywhere_is_sure_with_enough_documents(documents, clip, sure):
    """1 - 0.025^(1/G) < 1 % takes 368 documents; with a clip of 10 a document counts at most 10 % beyond."""
    found = Percentiles.of(np.zeros(documents * 5), np.arange(documents * 5) // 5)
    figure = found.figure(99, reach=Range(held=RareEvents(clip=clip)))
    assert (figure.low, figure.high) == (0.0, 0.0 if sure else None)
    assert figure.alike and figure.interval.method == "test-inversion, hoeffding"


def test_noise_of_estimated_values_widens_the_interval():
    rng = np.random.default_rng(1)
    values, documents = rng.lognormal(size=500), rng.integers(0, 25, 500)
    exact = Percentiles.of(values, documents).figure(90)
    noisy = Percentiles.of(values, documents, se=np.full(500, 0.5)).figure(90, exactness="estimated")
    assert noisy.exactness == "estimated" and noisy.value == exact.value
    assert (noisy.low, noisy.high) == pytest.approx((exact.low - 0.5, exact.high + 0.5))


def test_one_document_is_unknown_and_bad_input_refused():
    percentiles = Percentiles.of(np.arange(5.0), np.full(5, 2))
    found = percentiles.figure(50)
    assert (found.value, found.low, found.high, found.se, found.interval.known) == (2.0, None, None, None, False)
    with pytest.raises(UsageError, match="between 0 and 100"):
        percentiles.figure(100)
    with pytest.raises(UsageError, match="confidence"):
        percentiles.figure(50, confidence=2)
    with pytest.raises(ScoreError, match="no scored positions"):
        Percentiles.of(np.arange(0.0), np.arange(0))
    assert math.isfinite(found.value)
