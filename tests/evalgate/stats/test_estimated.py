"""Means of values that are estimates: their own errors widen an interval that documents make too narrow."""

from __future__ import annotations

import numpy as np
import pytest

from evalgate.core import Figure, Interval
from evalgate.metrics import Series, mean
from evalgate.stats.caveats import caveats
from evalgate.stats.clustered import clustered_mean
from evalgate.stats.estimated import not_below, sampling_error, with_sampling
from evalgate.stats.intervals import Sample
from evalgate.stats.rare import Range
from evalgate.stats.summarize import summarize
from tests.evalgate.score_tables import columns, make_case, replaced, table


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


def test_a_mean_below_its_certain_bound_is_the_bound() -> None:
    documents, rng = np.repeat(np.arange(30), 10), np.random.default_rng(0)
    low = rng.lognormal(-2, 0.5, 300)
    values, se = low - 0.05 + rng.normal(0, 0.01, 300), np.full(300, 1e-4)
    plain = Sample(Series(values, se=se), documents, support=(0.0, np.inf)).figure(mean())
    floor = Sample(Series(low), documents, support=(0.0, np.inf)).figure(mean())
    found = Sample(Series(values, se=se, low=low), documents, support=(0.0, np.inf)).figure(mean())
    assert plain.known < floor.known == found.known
    assert found.low == floor.low and found.high is not None and plain.high is not None and floor.high is not None
    assert found.high >= max(floor.high, plain.high)
    assert Sample(Series(values, se=se, low=low), documents).value(mean()) == pytest.approx(floor.known)
    above = Series(low + rng.normal(0.05, 0.2, 300), se=se, low=low)
    assert (above.values < low).any() and above.below == 0  # single values stay
    assert Sample(above, documents).figure(mean()).known == pytest.approx(above.values.mean())
    half_open = not_below(Figure(0.1, Interval(0.05, None)), Figure(0.2, Interval(0.1, 0.3)))
    assert (half_open.value, half_open.low, half_open.high) == (0.2, 0.1, None)


def test_the_bound_is_printed_and_a_note_says_so() -> None:
    case = make_case()
    whole = table(columns(case))
    kl = np.asarray(columns(case)["kl"])
    code = np.array([d == "code" for d in case.domain])
    low = np.where(code, 1.5 * kl, 0.5 * kl)
    estimated = replaced(whole, "kl", kl=kl.tolist(), kl_se=[1e-6] * len(kl), kl_low=low.tolist())
    ((_, overall, domains),) = summarize(estimated, kind="kl", noise_floor=0.0)
    means = {g.name: g.metrics["kl"].statistics["mean"].value for g in (overall, *domains)}
    assert means["code"] == pytest.approx(low[code].mean(), rel=1e-6)
    assert means["prose"] == pytest.approx(kl[~code].mean(), rel=1e-6)
    assert means["overall"] == pytest.approx(max(kl.mean(), low.mean()), rel=1e-6)
    notes = [n for n in caveats(estimated, kind="kl", noise_floor=0.0) if "certain lower bound" in n]
    assert any("of cand in code lies" in n for n in notes) and not any("in prose" in n for n in notes)
    assert not [n for n in caveats(whole, kind="kl", noise_floor=0.0) if "certain lower bound" in n]
