from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from scipy.special import ndtri

from evalgate.errors import MismatchError, UsageError
from evalgate.stats.mcnemar import exact_p, mcnemar, sign_flip_p
from tests.evalgate.stats import populations
from tests.evalgate.stats.holm import holm


def test_holm_by_hand():
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}) == pytest.approx(
        {"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02}
    )
    assert holm({}) == {}
    with pytest.raises(UsageError, match="'x'"):
        holm({"x": math.nan})


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.001, 0.5))
def test_holm_rejects_what_stepping_down_rejects(values, alpha):
    found = holm({str(i): p for i, p in enumerate(values)})
    rejected = set()
    for rank, (p, name) in enumerate(sorted((p, str(i)) for i, p in enumerate(values))):
        if p * (len(values) - rank) > alpha:
            break
        rejected.add(name)
    assert {name for name, p in found.items() if p <= alpha} == rejected


@given(st.integers(0, 40), st.integers(0, 40))
def test_exact_mcnemar_is_the_binomial_test(b, c):
    expected = scipy_stats.binomtest(b, b + c).pvalue if b + c else 1.0
    assert exact_p(b, c) == pytest.approx(expected)


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=8))
def test_sign_flips_are_enumerated_for_few_documents(totals):
    signs = list(itertools.product((-1, 1), repeat=len(totals)))
    sums = [abs(sum(s * t for s, t in zip(pattern, totals, strict=True))) for pattern in signs]
    expected = sum(x >= abs(sum(totals)) for x in sums) / len(signs)
    assert sign_flip_p(np.array(totals, dtype=float), seed=0) == pytest.approx(expected)


def test_random_flips_agree_with_enumeration():
    totals = np.random.default_rng(0).integers(-3, 6, 14).astype(float)
    padded = np.concatenate([totals, [1e-12]])  # one document more than is enumerated
    a, b = sign_flip_p(totals, seed=0), sign_flip_p(padded, seed=0, flips=40000)
    assert b == pytest.approx(a, abs=0.012)
    assert sign_flip_p(padded, seed=3, flips=100) == sign_flip_p(padded, seed=3, flips=100)


def test_documents_that_go_wrong_together_are_not_evidence_position_by_position():
    rng = np.random.default_rng(4)
    plain = clustered = 0
    for run in range(200):
        documents = np.repeat(np.arange(25), 40)
        lean = rng.normal(0, 0.3, 25)[documents]  # a document favours one side at random: the hypothesis is true
        first = rng.random(1000) < 0.5 + lean / 2
        second = rng.random(1000) < 0.5 - lean / 2
        found = mcnemar(first, second, documents=documents, seed=run, flips=399)
        plain += found.exact_p < 0.05
        clustered += found.clustered_p < 0.05
    assert plain / 200 > 0.3
    assert clustered / 200 <= 0.05 + 3 * math.sqrt(0.0475 / 200)


def test_mcnemar_counts_and_finds_a_real_difference():
    rng = np.random.default_rng(0)
    documents = np.repeat(np.arange(30), 20)
    first = rng.random(600) < 0.9
    second = first & (rng.random(600) < 0.9)
    found = mcnemar(first, second, documents=documents, seed=0, flips=2000)
    assert found.only_first == int((first & ~second).sum()) and found.only_second == 0
    assert found.difference.value == pytest.approx(first.mean() - second.mean())
    assert found.clustered_p < 0.01 and found.difference.low > 0
    with pytest.raises(MismatchError):
        mcnemar(first, second[1:], documents=documents, seed=0)
    with pytest.raises(UsageError, match="at least 1 flip"):
        mcnemar(first, second, documents=documents, seed=0, flips=0)


def test_sides_that_err_alike_but_in_other_documents_are_not_told_apart():
    """One side errs in a few documents, the other everywhere, as often: flips alone reject 10 % at 10 documents."""
    rng = np.random.default_rng(6)
    runs, wrong = 150, 0
    for run in range(runs):
        drawn = populations.corpus(rng, 10, "equal")
        first = drawn.latent > ndtri(0.97)
        second = rng.random(len(first)) < 0.03
        wrong += mcnemar(first, second, documents=drawn.documents, seed=run).clustered_p <= 0.05
    assert wrong / runs <= 0.05 + 3 * math.sqrt(0.0475 / runs)
