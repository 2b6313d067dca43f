"""The promise: from 24 documents on a 95 % interval holds 94 to 96 % of the time, each side missing at most 3 %.

Small and seeded, so that the bounds leave room for three standard errors of the count. benchmarks/coverage.py draws the
same corpora at full size.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from evalgate.metrics import Series, Statistic, mean
from evalgate.stats.intervals import Sample
from evalgate.stats.ratio import t_quantile
from tests.evalgate.stats import populations

RUNS, RANKED_RUNS = 300, 100
ROOM = 3 * math.sqrt(0.05 * 0.95 / RUNS)
SIDE = 0.03 + 3 * math.sqrt(0.03 * 0.97 / RUNS)
SD = 1.5
EXP, ROOT = Statistic("ratio", scale="exp"), Statistic("rms", scale="sqrt")

CASES = {
    "mean KL": (lambda c: c.kl(SD), mean(), (0.0, math.inf), 1.0),
    "mean delta-p": (lambda c: c.delta_prob(SD), mean(), (-1.0, 1.0), 0.0),
    "RMS delta-p": (lambda c: c.delta_prob(SD) ** 2, ROOT, (-math.inf, math.inf), 0.1 * math.sqrt(1.09)),
    "perplexity ratio": (lambda c: c.log_ratio(SD), EXP, (-math.inf, math.inf), math.exp(populations.RATIO)),
    "same top-1": (lambda c: c.agreement(0.97), mean(), (0.0, 1.0), 0.97),
    "rare flips": (lambda c: c.agreement(0.999), mean(), (0.0, 1.0), 0.999),
    "mean, Pareto": (lambda c: c.pareto(3), mean(), (0.0, math.inf), 1.0),
}


@pytest.fixture(scope="module")
def tallies():
    """How often the truth was above and below, by length, number of documents and case."""
    found = {}
    for kind in ("equal", "lognormal"):
        for groups in (12, 24, 50):
            rng = np.random.default_rng([groups, len(kind)])
            counts = {name: [0, 0] for name in (*CASES, "plain t")}
            for _ in range(RUNS):
                corpus = populations.corpus(rng, groups, kind)
                for name, (values, statistic, support, truth) in CASES.items():
                    sample = Sample(Series(values(corpus)), corpus.documents, support=support)
                    _count(counts[name], sample.figure(statistic), truth)
                low, high = plain_t(corpus.kl(SD), corpus.documents)
                counts["plain t"][0] += high < 1
                counts["plain t"][1] += low > 1
            found[kind, groups] = counts
    return found


def _count(count, figure, truth):
    count[0] += figure.high is not None and figure.high < truth
    count[1] += figure.low is not None and figure.low > truth


def plain_t(values, documents):
    """The textbook interval: linearised, G - 1 degrees of freedom."""
    sizes = np.bincount(documents)
    residuals = np.bincount(documents, weights=values) - values.mean() * sizes
    groups = len(sizes)
    se = math.sqrt(groups / (groups - 1) * np.square(residuals).sum()) / sizes.sum()
    reach = t_quantile(0.95, groups - 1.0) * se
    return values.mean() - reach, values.mean() + reach


@pytest.mark.parametrize("kind", ["equal", "lognormal"])
@pytest.mark.parametrize("groups", [24, 50])
@pytest.mark.parametrize("name", CASES)
def test_it_holds_from_24_documents_on(tallies, kind, groups, name):
    above, below = (n / RUNS for n in tallies[kind, groups][name])
    assert above + below <= 0.06 + ROOM
    assert max(above, below) <= SIDE


@pytest.mark.parametrize("kind", ["equal", "lognormal"])
@pytest.mark.parametrize("groups", [24, 50])
def test_percentiles_hold_and_leave_open_what_they_cannot_say(kind, groups):
    rng = np.random.default_rng([groups, len(kind), 1])
    counts, open_ends = {90: [0, 0], 99: [0, 0]}, 0
    truths = {90: 1.2815515655446004, 99: 2.3263478740408408}
    for _ in range(RANKED_RUNS):
        corpus = populations.corpus(rng, groups, kind)
        sample = Sample(Series(corpus.latent), corpus.documents)
        for level, truth in truths.items():
            figure = sample.figure(Statistic("p", "percentile", level=level))
            _count(counts[level], figure, truth)
            open_ends += level == 99 and figure.high is None
    for above, below in counts.values():
        assert (above + below) / RANKED_RUNS <= 0.06 + 3 * math.sqrt(0.05 * 0.95 / RANKED_RUNS)
    assert open_ends > 0


@pytest.mark.parametrize("kind", ["equal", "lognormal"])
@pytest.mark.parametrize("name", CASES)
def test_with_12_documents_it_errs_on_the_wide_side_if_at_all(tallies, kind, name):
    above, below = (n / RUNS for n in tallies[kind, 12][name])
    assert above + below <= 0.06 + ROOM


@pytest.mark.parametrize("kind", ["equal", "lognormal"])
def test_a_plain_t_interval_does_not_hold_here(tallies, kind):
    """Which shows that these corpora are hard enough: the truth is above it too often."""
    for groups in (12, 24, 50):
        assert tallies[kind, groups]["plain t"][0] / RUNS > 0.045


def test_not_absurdly_wide():
    """At 50 equal documents, at most twice what knowing the standard deviation beforehand would give, on average."""
    rng = np.random.default_rng(3)
    widths, means = [], []
    for _ in range(100):
        corpus = populations.corpus(rng, 50, "equal")
        figure = Sample(Series(corpus.kl(SD)), corpus.documents, support=(0.0, math.inf)).figure(mean())
        widths.append(figure.high - figure.low)
        means.append(figure.value)
    assert np.mean(widths) < 2 * 3.92 * np.std(means)


@pytest.mark.parametrize("kind", ["equal", "lognormal"])
def test_a_correlation_holds(kind):
    rng = np.random.default_rng(len(kind))
    misses = 0
    runs = 200
    for _ in range(runs):
        corpus = populations.corpus(rng, 24, kind)
        reference = populations.reference_nll(rng, np.bincount(corpus.documents))
        candidate = Series(reference + corpus.log_ratio(SD))
        found = Sample(Series(reference), corpus.documents).correlation(candidate)
        misses += not found.low <= populations.true_correlation(SD) <= found.high
    assert misses / runs <= 0.06 + 3 * math.sqrt(0.06 * 0.94 / runs)


@pytest.mark.parametrize(("between", "most"), [("0.5", 0.07), ("0.8", 0.11)])
def test_one_text_holds_where_its_correlation_dies_out(between, most):
    rng = np.random.default_rng(5)
    runs, misses, over_windows = 150, 0, 0
    for _ in range(runs):
        values = populations.one_text(rng, 120, between)
        windows = np.repeat(np.arange(120), values.shape[1])
        found = Sample(Series(values.ravel()), np.zeros(values.size, dtype=np.int64), windows=windows).figure(mean())
        alone = Sample(Series(values.ravel()), windows).figure(mean())
        misses += not found.low <= 1 <= found.high
        over_windows += not alone.low <= 1 <= alone.high
    assert misses / runs <= most
    assert over_windows > 2 * misses


def test_the_populations_have_the_truth_they_claim():
    rng = np.random.default_rng(9)
    corpus = populations.corpus(rng, 40_000, "equal")
    means = np.bincount(corpus.documents, weights=corpus.kl(0.5)) / 100
    assert np.mean(means) == pytest.approx(1.0, abs=0.01)
    assert corpus.agreement(0.97).mean() == pytest.approx(0.97, abs=0.001)
    assert corpus.log_ratio(0.5).mean() == pytest.approx(populations.RATIO, abs=0.001)
    assert np.mean(corpus.delta_prob(0.5) ** 2) == pytest.approx(0.01 * 1.09, rel=0.02)
    reference = populations.reference_nll(rng, np.full(40_000, 100))
    related = np.corrcoef(reference, reference + corpus.log_ratio(0.5))[0, 1]
    assert related == pytest.approx(populations.true_correlation(0.5), abs=1e-3)
    assert np.corrcoef(corpus.latent[:-1], corpus.latent[1:])[0, 1] == pytest.approx(0.3 + 0.7 * 0.6, abs=0.02)
    effects = np.concatenate([np.log(populations.one_text(rng, 64, "long")).mean(axis=1) for _ in range(400)])
    # 30 % of 1.5^2 between windows, and what is left of an AR(1) with 0.6 in a mean of 50.
    assert np.var(effects) == pytest.approx(2.25 * (0.3 + 0.7 * 4 / 50), rel=0.25)
