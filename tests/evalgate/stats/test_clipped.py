"""Limits on means whose documents count only so far beyond them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from evalgate.stats.betting import bar, log_capital
from evalgate.stats.clipped import Side, default_clip, largest_share, largest_share_so_far, sides


def test_a_side_counts_by_length_and_only_so_far():
    totals, sizes = np.array([1.0, 40.0, 2.0]), np.array([10.0, 10.0, 40.0])
    (side,) = sides(None, 0.1, ideal=0.0, clip=3.0, support=(0.0, math.inf))
    assert (side.limit, side.sign, side.reach) == (0.1, 1, pytest.approx(0.2))
    assert side.losses(totals, sizes) == pytest.approx([0.0, 39.0, -2.0])
    assert side.most(sizes) == pytest.approx(0.2 * 20)
    assert side.cut(totals, sizes) == 1 and side.cuts(sizes)


def test_the_distance_is_that_from_the_ideal_or_half_the_room_between_two_limits():
    (agreement,) = sides(0.97, None, ideal=1.0, clip=4.0, support=(0.0, 1.0))
    assert (agreement.sign, agreement.reach) == (-1, pytest.approx(0.09))
    assert (agreement.room, agreement.slack) == (pytest.approx(0.97), pytest.approx(0.03))
    upper, lower = sides(-0.01, 0.03, ideal=0.0, clip=3.0, support=(-math.inf, math.inf))
    assert (upper.reach, lower.reach) == (pytest.approx(0.04), pytest.approx(0.04))
    (nothing,) = sides(None, 0.0, ideal=0.0, clip=3.0, support=(-math.inf, math.inf), spread=0.5)
    assert nothing.reach == pytest.approx(1.0)


def test_a_range_that_ends_before_the_reach_cuts_nothing():
    (side,) = sides(None, 0.6, ideal=0.0, clip=3.0, support=(0.0, 1.0))
    assert side.most(np.full(5, 100.0)) == pytest.approx(40.0) and not side.cuts(np.full(5, 100.0))


@pytest.mark.parametrize(
    ("clip", "error", "figures", "wanted"),
    [
        (None, 0.025, (0, 0.25, 0.5), [11, 14, 20]),
        (4.0, 0.025, (0, 0.25, 0.5), [16, 20, 29]),
        (10.0, 0.025, (0, 0.25, 0.5), [43, 56, 83]),
        (None, 0.0025, (0,), [17]),
        (4.0, 0.0025, (0,), [25]),
        (10.0, 0.0025, (0,), [66]),
    ],
)
def test_how_many_documents_a_pass_takes_at_the_least(clip, error, figures, wanted):
    """The table of docs/statistics.md: documents alike, at these shares of the limit; the last three for ten rules."""

    def passes(count, figure):
        (side,) = sides(None, 1.0, ideal=0.0, clip=clip or default_clip(count), support=(0.0, math.inf))
        return side.beaten(np.full(count, float(figure)), np.ones(count), error=error)

    assert [next(n for n in range(1, 200) if passes(n, figure)) for figure in figures] == wanted


@pytest.mark.parametrize("sign", [1, -1])
def test_the_bound_is_where_the_bets_begin_to_win(sign):
    rng = np.random.default_rng(0)
    sizes = rng.integers(20, 200, 60).astype(float)
    totals = sign * rng.gamma(2, 0.5, 60) * sizes
    side = Side(sign * 2.0, sign, reach=8.0)
    value = float(totals.sum() / sizes.sum())
    end = side.bound(totals, sizes, error=0.025)
    assert sign * end > sign * value
    for x, wanted in ((end + sign * 1e-6, True), (end - sign * 1e-3, False)):
        losses = side.losses(totals, sizes, at=x)
        assert (log_capital(losses, most=side.most(sizes))[-1] >= bar(0.025)) == wanted
    assert not side.beaten(totals, sizes, error=0.025) or sign * end <= 2.0


def test_the_bound_holds_for_tails_without_a_mean_square():
    """The clipped mean lies above the bound in at most the error rate of samples."""
    rng = np.random.default_rng(3)
    error, runs, wrong = 0.1, 300, 0
    side = Side(1.0, 1, reach=2.0)
    draws = (1 - rng.random(2_000_000)) ** (-1 / 1.5) / 3
    # The clip is on what is beyond the bound itself, so the truth is the mean for which clipped losses average 0.
    low, high = 0.0, 2.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(draws - middle, 2.0).mean() > 0 else (low, middle)
    for _ in range(runs):
        totals = rng.choice(draws, 30)
        wrong += side.bound(totals, np.ones(30), error=error) < low
    assert wrong / runs <= error + 3 * math.sqrt(error * (1 - error) / runs)


def test_the_clip_grows_with_the_documents():
    assert [default_clip(n) for n in (2, 24, 384)] == pytest.approx([3, 3, 6])
    assert [default_clip(n, share=True) for n in (2, 24, 384)] == pytest.approx([4, 4, 8])


def test_the_share_of_documents_is_bounded():
    for count, n in ((0, 12), (3, 24), (24, 24)):
        wanted = scipy_stats.beta.ppf(0.975, count + 1, n - count) if count < n else 1.0
        assert largest_share(count, n, error=0.025) == pytest.approx(wanted)
    rng = np.random.default_rng(4)
    runs, wrong = 200, 0
    for _ in range(runs):
        beyond = rng.random(40) < 0.2
        # Looked at after every fifth document: the smallest bound may be below the truth with the error rate alone.
        wrong += min(largest_share_so_far(beyond[:n], error=0.1) for n in range(5, 41, 5)) < 0.2
    assert wrong / runs <= 0.1 + 3 * math.sqrt(0.09 / runs)
    assert largest_share_so_far(np.ones(5, dtype=bool), error=0.1) == 1.0
