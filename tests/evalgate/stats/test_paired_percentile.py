"""Percentiles of two sides of the same positions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evalgate.stats.paired_percentile import PairedPercentile
from tests.evalgate.stats.populations import corpus


def test_pairing_makes_the_interval_of_a_shift_narrow():
    drawn = corpus(np.random.default_rng(0), 60, "equal")
    own = drawn.kl(1.5)
    pair = PairedPercentile(own + 0.1, own, drawn.documents, 90.0)
    low, high = pair.ends(confidence=0.95)
    assert pair.value == pytest.approx(0.1)
    assert low <= 0.1 <= high and high - low < 0.1


def test_beyond_is_what_it_says():
    pair = PairedPercentile(np.array([1.0, 5, 6, 7]), np.array([1.0, 2, 3, 9]), np.array([0, 0, 1, 1]), 50.0)
    assert pair.percentiles == (5.5, 2.5)
    assert list(pair.beyond(0.0).totals) == [1, 0] and list(pair.beyond(4.0).totals) == [0, -1]


def test_ends_are_open_where_few_documents_carry_the_tail():
    drawn = corpus(np.random.default_rng(1), 6, "equal")
    own = drawn.kl(1.5)
    assert PairedPercentile(own, own * 1.1, drawn.documents, 99.9).ends(confidence=0.95) == (None, None)
    one = PairedPercentile(own[:100], own[:100], np.zeros(100, dtype=int), 50.0)
    assert one.ends(confidence=0.95) == (None, None)


def test_the_interval_holds_the_true_difference():
    """Both sides have the same distribution: the true difference is 0."""
    rng = np.random.default_rng(2)
    runs, above, below = 80, 0, 0
    for _ in range(runs):
        drawn = corpus(rng, 24, "equal")
        other = np.exp(1.5 * (0.9 * drawn.latent + math.sqrt(1 - 0.81) * drawn.noise) - 1.125)
        low, high = PairedPercentile(drawn.kl(1.5), other, drawn.documents, 90.0).ends(confidence=0.95)
        above += high is not None and high < 0
        below += low is not None and low > 0
    assert max(above, below) / runs <= 0.025 + 3 * math.sqrt(0.025 / runs)
