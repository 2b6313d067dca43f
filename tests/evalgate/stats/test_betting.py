"""Bets against a mean: the error rate for any distribution, however often one looks, and against slow arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evalgate.errors import ScoreError, UsageError
from evalgate.stats.betting import Bets, bar, log_capital, smallest


def capital_by_hand(losses, most, total=None):
    """Three gamblers, one document after the other, in plain Python."""
    purses, seen, found = [1 / 6, 1 / 3, 1 / 2], 0.0, []
    for place, loss in enumerate(losses):
        expected = 0.0 if total is None else -seen / (total - place)
        for i, bet in enumerate((0.25, 0.6, 0.95)):
            purses[i] *= 1 - bet * (loss - expected) / (most - expected)
        seen += loss
        found.append(sum(purses))
    return found


@pytest.mark.parametrize("total", [None, 40])
def test_capital_is_that_of_three_gamblers(total):
    losses = np.random.default_rng(0).uniform(-1, 1, 40)
    losses -= losses.mean()
    wanted = np.log(capital_by_hand(losses[:39], 1.5, total))
    assert log_capital(losses, most=1.5, total=total)[:39] == pytest.approx(wanted)
    bets = Bets(1.5, total)
    running = []
    for loss in losses[:39]:
        bets.add(float(loss))
        running.append(bets.log)
    assert running == pytest.approx(list(wanted))
    assert bets.peak == pytest.approx(max(0.0, *wanted))


def test_a_loss_beyond_the_largest_counts_as_the_largest():
    assert log_capital(np.array([-1.0, 5.0]), most=1.0) == pytest.approx(log_capital(np.array([-1.0, 1.0]), most=1.0))
    one, other = Bets(1.0), Bets(1.0)
    one.add(7.0)
    other.add(1.0)
    assert one.log == other.log


def test_a_finite_corpus_that_cannot_make_up_for_what_was_seen_is_certain():
    losses = np.array([-1.0, -1.0, -1.0, 0.1])
    assert math.isinf(log_capital(losses, most=0.5, total=4)[-1])


SHAPES = {
    "even": lambda rng, shape: rng.uniform(-1, 1, shape),
    "rare large losses": lambda rng, shape: np.where(rng.random(shape) < 0.05, 1.0, -1 / 19),
    "rare large gains": lambda rng, shape: np.where(rng.random(shape) < 0.05, -3.0, 3 / 19),
    "two-point": lambda rng, shape: np.where(rng.random(shape) < 0.5, 1.0, -1.0),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_error_rate_holds_with_a_look_after_every_document(shape):
    """A mean loss of exactly 0: the capital may reach 1 / error in at most that share of runs."""
    rng = np.random.default_rng(1)
    runs, error = 1500, 0.1
    wrong = sum(log_capital(SHAPES[shape](rng, 150), most=1.0).max() >= bar(error) for _ in range(runs))
    assert wrong / runs <= error + 3 * math.sqrt(error * (1 - error) / runs)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_error_rate_holds_for_a_finite_corpus(shape):
    """This very corpus has a mean loss of 0; its documents come in random order, without replacement."""
    rng = np.random.default_rng(2)
    runs, error, wrong = 1000, 0.1, 0
    for _ in range(runs):
        losses = SHAPES[shape](rng, 60)
        losses = losses - losses.mean()
        # Up to the last document: then the mean is known, and nothing is left to bet on.
        wrong += log_capital(losses, most=float(losses.max()), total=60)[:-1].max() >= bar(error)
    assert wrong / runs <= error + 3 * math.sqrt(error * (1 - error) / runs)


def test_how_many_documents_without_a_loss_it_takes():
    """Gains of half the largest loss: what a limit three times the distance away from its clip shows."""
    found = log_capital(np.full(40, -0.5), most=1.0)
    assert [int(np.argmax(found >= bar(error))) + 1 for error in (0.025, 0.0025)] == [11, 17]


def test_the_smallest_that_is_beaten():
    assert smallest(lambda x: x >= math.pi, start=0.0, step=0.1) == pytest.approx(math.pi)
    assert smallest(lambda x: x >= -5, start=-3.0, step=0.1) == -3.0
    assert math.isinf(smallest(lambda x: False, start=0.0, step=1.0))


def test_what_makes_no_sense_is_refused():
    for most in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(UsageError, match="positive number"):
            log_capital(np.zeros(2), most=most)
    with pytest.raises(UsageError, match="between 0 and 1"):
        bar(0.0)
    with pytest.raises(UsageError, match="corpus of 1 documents"):
        log_capital(np.zeros(2), most=1.0, total=1)
    bets = Bets(1.0, 1)
    with pytest.raises(ScoreError, match="must be a number"):
        bets.add(math.nan)
    bets.add(0.0)
    with pytest.raises(ScoreError, match="one more"):
        bets.add(0.0)
