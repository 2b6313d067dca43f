from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from evalgate.core import Limits
from evalgate.errors import ScoreError, UsageError
from evalgate.stats.sequential import BettingSequence


def slow_capitals(xs, m, *, alpha, total=None):
    """Hedged capital as the paper writes it, one candidate mean at a time."""
    up = down = 1.0
    for t in range(1, len(xs) + 1):
        before = xs[: t - 1]
        variance = 0.25
        for i in range(1, t):
            variance += (xs[i - 1] - (0.5 + math.fsum(xs[:i])) / (i + 1)) ** 2
        variance /= t
        bet = math.sqrt(2 * math.log(2 / alpha) / (variance * t * math.log(1 + t)))
        mt = m if total is None else (total * m - math.fsum(before)) / (total - t + 1)
        up *= 1 + min(bet, 0.5 / mt) * (xs[t - 1] - mt)
        down *= 1 - min(bet, 0.5 / (1 - mt)) * (xs[t - 1] - mt)
    return up, down


@pytest.mark.parametrize("total", [None, 60])
def test_bounds_are_where_the_capital_reaches_its_bar(total):
    xs = list(np.random.default_rng(0).beta(2, 6, 30))
    sequence = BettingSequence(clip=2.0, confidence=0.9, total=total)
    history = [sequence.add(2 * x) for x in xs]
    low, high = history[-1].low / 2, history[-1].high / 2
    step = 0.002

    def ruled_out(m, side):
        # The interval only ever shrinks: look at every prefix.
        return any(slow_capitals(xs[:t], m, alpha=0.1, total=total)[side] >= 2 / 0.1 for t in range(1, len(xs) + 1))

    assert ruled_out(low, 0) and not ruled_out(low + step, 0)
    assert ruled_out(high, 1) and not ruled_out(high - step, 1)


def test_it_never_widens_and_a_prefix_is_a_prefix():
    xs = np.random.default_rng(1).exponential(0.1, 60)
    sequence = BettingSequence(clip=1.0)
    history = [sequence.add(x) for x in xs]
    again = BettingSequence(clip=1.0)
    assert [again.add(x) for x in xs[:20]] == history[:20]
    for a, b in pairwise(history):
        assert a.low <= b.low <= b.high <= a.high
    assert sequence.seen == 60


DRAWS = {
    "two values": (lambda rng, n: (rng.random(n) < 0.05).astype(float), 0.05),
    "skewed": (lambda rng, n: rng.beta(0.5, 9.5, n), 0.05),
    "middling": (lambda rng, n: rng.beta(4, 4, n), 0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_it_holds_at_every_look_at_once(name):
    draw, truth = DRAWS[name]
    rng = np.random.default_rng(3)
    missed = 0
    for _ in range(150):
        sequence = BettingSequence(clip=1.0, confidence=0.9)
        try:
            missed += any(not b.low <= truth <= b.high for b in (sequence.add(x) for x in draw(rng, 60)))
        except ScoreError:
            missed += 1
    # 10 % allowed at all 60 looks together; three standard errors of 150 runs above that.
    assert missed / 150 <= 0.10 + 3 * math.sqrt(0.09 / 150)


def test_a_finite_corpus_is_closed_in_on_and_ends_exact():
    rng = np.random.default_rng(5)
    missed, narrower = 0, 0
    for _ in range(80):
        corpus = rng.permutation(rng.beta(1, 9, 80))
        finite, endless = BettingSequence(clip=1.0, confidence=0.9, total=80), BettingSequence(clip=1.0, confidence=0.9)
        held = True
        for i, x in enumerate(corpus):
            bounds, other = finite.add(x), endless.add(x)
            held = held and bounds.low - 1e-12 <= corpus.mean() <= bounds.high + 1e-12
            if i == 60:
                narrower += bounds.high - bounds.low < other.high - other.low
        missed += not held
        assert bounds.low == pytest.approx(corpus.mean()) and bounds.high == pytest.approx(corpus.mean())
    assert missed / 80 <= 0.10 + 3 * math.sqrt(0.09 / 80)
    assert narrower >= 76


def test_verdicts_come_early_when_the_limit_is_far():
    sequence = BettingSequence(clip=0.2, confidence=0.95)
    rng = np.random.default_rng(0)
    verdicts = [Limits(None, 0.1).verdict(sequence.add(x)) for x in rng.gamma(4, 0.005, 200)]
    assert verdicts[0] == "undecided"
    assert verdicts.index("pass") < 40
    assert Limits(None, 0.001).verdict(sequence.interval) == "fail"


def test_clipping_is_counted_and_bad_input_refused():
    sequence = BettingSequence(clip=0.5, total=2)
    for mean in (0.7, 0.5):
        sequence.add(mean)
        assert sequence.clipped == 1
    with pytest.raises(ScoreError, match="one more"):
        sequence.add(0.1)
    with pytest.raises(ScoreError, match="finite and not negative"):
        BettingSequence(clip=1.0).add(math.nan)
    with pytest.raises(UsageError, match="clip"):
        BettingSequence(clip=0.0)
    with pytest.raises(UsageError, match="at least 1 document"):
        BettingSequence(clip=1.0, total=0)


def test_drift_is_an_error_not_an_interval():
    sequence = BettingSequence(clip=1.0)
    with pytest.raises(ScoreError, match="random order"):
        for x in [0.0] * 100 + [1.0] * 2000:
            sequence.add(x)
