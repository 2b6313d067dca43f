"""Percentiles of two sides of the same positions."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from scipy.stats import norm

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


@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_the_interval_holds_the_true_difference(scale):
    """Also between sides of different spread, where it matters that neither percentile is known."""
    rng = np.random.default_rng(2)
    runs, misses, level = 60, Counter(), 90.0
    truth = (1 - scale) * math.exp(1.5 * norm.ppf(level / 100) - 1.125)
    for _ in range(runs):
        drawn = corpus(rng, 24, "equal")
        one = drawn.kl(1.5)
        two = scale * np.exp(1.5 * (0.97 * drawn.latent + math.sqrt(1 - 0.97**2) * drawn.noise) - 1.125)
        for sign, (first, second) in ((1, (one, two)), (-1, (two, one))):
            low, high = PairedPercentile(first, second, drawn.documents, level).ends(confidence=0.95)
            misses[sign, "below"] += high is not None and high < sign * truth
            misses[sign, "above"] += low is not None and low > sign * truth
    assert max(misses.values()) / runs <= 0.025 + 3 * math.sqrt(0.025 / runs)


def test_identical_sides_differ_by_nothing():
    drawn = corpus(np.random.default_rng(3), 40, "equal")
    pair = PairedPercentile(drawn.kl(1.5), drawn.kl(1.5), drawn.documents, 90.0)
    low, high = pair.ends(confidence=0.95)
    assert pair.value == 0 and low <= 0 <= high and high - low < 0.1
