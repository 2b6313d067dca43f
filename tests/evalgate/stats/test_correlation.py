from __future__ import annotations

import math

import numpy as np
import pytest

from evalgate.errors import ScoreError
from evalgate.stats.correlation import correlation


def test_the_figure_is_numpys_and_its_error_the_jackknifes():
    rng = np.random.default_rng(2)
    x = rng.normal(size=400)
    y = x + rng.normal(size=400)
    documents = rng.integers(0, 20, 400) * 3
    found = correlation(x + 1e4, y * 1e3, documents)
    r = np.corrcoef(x, y)[0, 1]
    assert found.value == pytest.approx(r, abs=1e-9)
    moves = [
        math.atanh(np.corrcoef(x[documents != d], y[documents != d])[0, 1]) - math.atanh(r) for d in set(documents)
    ]
    jackknife = math.sqrt(19 / 20 * math.fsum(m * m for m in moves)) * (1 - r * r)
    # The pooled reading of the spread may be a little larger, as for means.
    assert jackknife * (1 - 1e-6) <= found.se < 1.3 * jackknife
    assert -1 < found.low < found.value < found.high < 1
    assert (found.n, found.documents) == (400, 20)


def test_a_sign_turns_the_interval_over():
    rng = np.random.default_rng(3)
    x, documents = rng.normal(size=300), np.repeat(np.arange(30), 10)
    y = x + rng.exponential(size=300)
    one, two = correlation(x, y, documents), correlation(x, -y, documents)
    assert (two.low, two.value, two.high) == pytest.approx((-one.high, -one.value, -one.low))


def test_a_correlation_of_one_leaves_its_lower_end_open():
    x, documents = np.random.default_rng(4).normal(size=100), np.repeat(np.arange(10), 10)
    found = correlation(x, 2 * x, documents)
    assert (found.low, found.value, found.high, found.se) == (None, pytest.approx(1.0), found.value, None)
    assert found.interval.known


def test_undefined_and_unknown():
    x = np.arange(5.0)
    assert correlation(np.ones(5), x, np.arange(5)) is None
    single = correlation(x, x**2, np.zeros(5, dtype=int))
    assert single.low is None and not single.interval.known
    with pytest.raises(ScoreError, match="no scored positions"):
        correlation(x[:0], x[:0], np.arange(0))
