"""One long text: what counts as a draw, and the union over windows and batches."""

from __future__ import annotations

import numpy as np
import pytest

from evalgate.metrics import Series, Statistic, mean
from evalgate.stats.intervals import Sample
from evalgate.stats.units import FEWEST_WINDOWS, Units, drifts

WINDOWS = np.repeat(np.arange(100) * 2 + 7, 5)
ONE = np.zeros(500, dtype=np.int64)
VALUES = np.random.default_rng(0).lognormal(size=500)


def test_documents_are_the_units_wherever_there_are_two():
    documents = np.repeat([0, 3], 250)
    units = Units.of(documents, WINDOWS)
    assert len(units.codes) == 1 and units.codes[0] is documents
    assert (units.documents, units.within_text) == (2, False)


def test_one_text_is_cut_into_windows_and_two_kinds_of_batches():
    units = Units.of(ONE, WINDOWS)
    assert [len(np.unique(codes)) for codes in units.codes] == [100, 25, 8]
    assert units.within_text and units.documents == 1
    for codes in units.codes:
        # Consecutive windows, whole, in batches that differ by a window at most.
        assert (np.diff(codes) >= 0).all()
        assert all(len(np.unique(codes[w == WINDOWS])) == 1 for w in np.unique(WINDOWS))
        sizes = np.bincount(codes) // 5
        assert sizes.max() - sizes.min() <= 1


def test_few_windows_or_none_give_no_interval():
    few = np.repeat(np.arange(FEWEST_WINDOWS - 1), 5)
    assert Units.of(np.zeros(len(few), dtype=int), few).codes == ()
    assert Units.of(ONE).codes == ()
    found = Sample(Series(VALUES), ONE).figure(mean())
    assert not found.interval.known and found.low is None and found.high is None


@pytest.mark.parametrize("statistic", [mean(), Statistic("median", "percentile"), Statistic("r", scale="exp")])
def test_the_interval_is_the_union_and_says_what_it_speaks_of(statistic):
    within = Sample(Series(VALUES), ONE, windows=WINDOWS).figure(statistic)
    alone = [Sample(Series(VALUES), codes).figure(statistic) for codes in Units.of(ONE, WINDOWS).codes]
    assert within.value == pytest.approx(alone[0].value)
    assert within.low == pytest.approx(min(f.low for f in alone))
    assert within.high == pytest.approx(max(f.high for f in alone))
    assert within.se == pytest.approx(max(f.se for f in alone))
    assert within.interval.label == "within this text" and within.documents == 1
    assert alone[0].interval.label == ""


def test_an_end_open_over_one_kind_of_unit_is_open():
    p99 = Statistic("p99", "percentile", level=99)
    over_windows = Sample(Series(VALUES), WINDOWS).figure(p99)
    within = Sample(Series(VALUES), ONE, windows=WINDOWS).figure(p99)
    assert within.high is None and within.low <= over_windows.low


def test_a_trend_is_seen_and_noise_is_not():
    trend = np.linspace(0, 1, 500)
    assert drifts(VALUES + 3 * trend, WINDOWS) and drifts(VALUES - 3 * trend, WINDOWS)
    rng = np.random.default_rng(1)
    seen = sum(drifts(rng.normal(size=500), WINDOWS) for _ in range(300))
    assert seen <= 12
    assert not drifts(trend[:100], WINDOWS[:100])
