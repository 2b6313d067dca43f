"""Means of values that are estimates: their own errors widen an interval that documents make too narrow."""

from __future__ import annotations

import numpy as np
import pytest

from evalgate.core import Figure, Interval
from evalgate.stats.clustered import clustered_mean
from evalgate.stats.estimated import sampling_error, with_sampling
from evalgate.stats.rare import Range


def test_the_error_is_that_of_a_mean_of_independent_estimates() -> None:
    se = np.array([0.1, 0.2, 0.4])
    draws = np.random.default_rng(0).normal(0, se, (200_000, 3)).mean(axis=1)
    assert sampling_error(se) == pytest.approx(draws.std(), rel=0.01)


def test_documents_that_agree_by_chance_do_not_narrow_the_interval() -> None:
    values, documents = np.full(40, 0.5), np.repeat(np.arange(4), 10)
    plain = clustered_mean(values, documents, reach=Range((0.5 - 1e-6, 0.5 + 1e-6)))
    assert plain.se == 0
    widened = with_sampling(plain, np.full(40, 0.1))
    own = 0.1 / np.sqrt(40)
    assert widened.se == pytest.approx(own)
    assert widened.low == pytest.approx(0.5 - 1.95996 * own, rel=1e-4)
    assert widened.high == pytest.approx(0.5 + 1.95996 * own, rel=1e-4)


def test_a_wide_interval_an_unknown_one_and_open_ends_stay() -> None:
    wide = Figure(0.5, Interval(0.1, 0.9), 0.2, n=4, documents=2)
    assert with_sampling(wide, np.full(4, 1e-3)) == wide
    assert with_sampling(wide, None) is wide
    unknown = Figure(0.5, Interval(None, None), n=4, documents=1)
    assert with_sampling(unknown, np.full(4, 0.1)) is unknown
    half_open = with_sampling(Figure(0.5, Interval(0.5, None), 0.0, n=4, documents=4), np.full(4, 0.1))
    assert (half_open.low, half_open.high) == (pytest.approx(0.5 - 1.95996 * 0.05, rel=1e-4), None)
