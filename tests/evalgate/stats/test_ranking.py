"""Which candidates can be told apart: against plain loops, and how often equal ones are called different."""

import numpy as np
import pyarrow as pa
import pytest

from evalgate.errors import MismatchError, UsageError
from evalgate.metrics import Series, mean, split_candidates
from evalgate.stats.intervals import Sample
from evalgate.stats.ranking import ranking, ranking_of
from evalgate.table import column_type


def table(documents=24, length=20, **columns):
    """candidate -> {column: values [documents, length]}; documents of equal length, one window each."""
    parts = []
    for name, own in columns.items():
        n = documents * length
        made = {
            "candidate": [name] * n,
            "domain": ["prose"] * n,
            "document": [f"d{i // length}" for i in range(n)],
            "window": np.repeat(np.arange(documents), length),
            "position": np.tile(np.arange(1, length + 1), documents),
            "token": np.arange(n) % 7,
            "bytes": np.full(n, 3),
        }
        made |= {column: np.asarray(values).reshape(-1) for column, values in own.items()}
        parts.append(pa.table({key: pa.array(values).cast(column_type(key)) for key, values in made.items()}))
    return pa.concat_tables(parts)


def drawn(rng, shift=1.0, documents=24, length=20):
    own = rng.lognormal(0, 0.5, (documents, 1))
    return shift * own * rng.lognormal(0, 0.3, (documents, length))


def test_best_comes_first_and_places_follow_from_what_is_proven():
    rng = np.random.default_rng(1)
    base = drawn(rng)
    near = base * (1 + rng.normal(0, 0.2, base.shape))
    found = ranking(table(worst={"kl": base * 3}, near={"kl": near}, best={"kl": base}), "kl")
    assert found.places[-1].candidate == "worst" and found.place("worst").text == "3"
    assert {found.place("best").text, found.place("near").text} == {"1-2"}
    assert found.place("best").tied == ["near"] and found.place("worst").tied == []
    assert [(p.first, p.second) for p in found.pairs][-1][1] == "worst"
    assert {p.better for p in found.pairs} == {"first", "neither"}


def test_the_document_pairs_what_its_difficulty_hides():
    """Documents differ tenfold; a candidate that is 5 % worse on each is still told apart."""
    rng = np.random.default_rng(2)
    base = drawn(rng) * np.logspace(-1, 1, 24)[:, None]
    worse = base * 1.05
    found = ranking(table(worse={"kl": worse}, base={"kl": base}), "kl")
    intervals = [
        Sample(Series(values.reshape(-1)), np.repeat(np.arange(24), 20)).figure(mean()) for values in (base, worse)
    ]
    assert intervals[0].high > intervals[1].low  # alone they overlap
    assert found.pairs[0].better == "first" and found.place("base").text == "1"


def test_pairs_are_stepped_down_as_holm_does():
    """Against a loop over all pairs: every pair's confidence is that of the step that decided it."""
    rng = np.random.default_rng(3)
    base = drawn(rng)
    factors = {"a": 1.0, "b": 1.005, "c": 1.03, "d": 1.4}
    values = {name: base * factor + rng.normal(0, 0.15, base.shape) for name, factor in factors.items()}
    documents = np.repeat(np.arange(24), 20)
    found = ranking(table(**{name: {"kl": np.abs(own)} for name, own in values.items()}), "kl")
    stored = {name: np.abs(own).astype(np.float32).astype(float).reshape(-1) for name, own in values.items()}

    left = {(p.first, p.second) for p in found.pairs}
    while left:
        level = 1 - 0.05 / len(left)
        figures = {
            pair: Sample(Series(stored[pair[0]] - stored[pair[1]]), documents).figure(mean(), confidence=level)
            for pair in left
        }
        now = {pair for pair, figure in figures.items() if figure.high < 0 or figure.low > 0}
        for pair in now or left:
            mine = next(p for p in found.pairs if (p.first, p.second) == pair)
            assert mine.difference.confidence == pytest.approx(level)
            assert (mine.better == "neither") is (pair not in now)
            expected = [figures[pair].value, figures[pair].low, figures[pair].high]
            assert [mine.difference.value, mine.difference.low, mine.difference.high] == pytest.approx(expected)
        left -= now or left
    assert {p.better for p in found.pairs} == {"first", "neither"}  # the example has both


def test_equal_candidates_are_rarely_told_apart():
    """Four candidates of one distribution: some pair of the six is called different in at most 5 % of draws."""
    rng = np.random.default_rng(4)
    draws, wrong = 150, 0
    for _ in range(draws):
        own = rng.lognormal(0, 0.7, (24, 1))
        sides = {name: {"kl": own * rng.lognormal(0, 0.5, (24, 1)) * rng.lognormal(0, 0.3, (24, 5))} for name in "abcd"}
        found = ranking(table(length=5, **sides), "kl")
        wrong += any(p.better != "neither" for p in found.pairs)
    assert wrong <= 0.05 * draws + 2 * (0.05 * 0.95 * draws) ** 0.5


def test_higher_is_better_where_the_metric_says_so():
    rng = np.random.default_rng(5)
    top = rng.integers(0, 50, (24, 20))
    often, seldom = rng.random((24, 20)) < 0.05, rng.random((24, 20)) < 0.4
    sides = {
        "seldom": {"ref_top1": top, "cand_top1": np.where(seldom, 60, top)},
        "often": {"ref_top1": top, "cand_top1": np.where(often, 60, top)},
    }
    found = ranking(table(**sides), "top1_agreement")
    assert [place.candidate for place in found.places] == ["often", "seldom"]
    assert found.pairs[0].better == "first" and found.pairs[0].difference.value > 0


def test_bounds_prove_only_what_they_exclude():
    rng = np.random.default_rng(6)
    base = drawn(rng)
    sides = {
        "far": {"kl_low": base * 2, "kl_high": base * 3},
        "near": {"kl_low": base * 0.5, "kl_high": base},
        "wide": {"kl_low": base * 0.6, "kl_high": base * 2.5},
    }
    found = ranking(table(**sides), "kl")
    assert [place.candidate for place in found.places] == ["near", "wide", "far"]
    better = {(p.first, p.second): p.better for p in found.pairs}
    assert better == {("near", "wide"): "neither", ("near", "far"): "first", ("wide", "far"): "neither"}
    assert all(p.difference is None for p in found.pairs)
    open_ended = {name: {"kl_low": own["kl_low"]} for name, own in sides.items()}
    assert {p.better for p in ranking(table(**open_ended), "kl").pairs} == {"neither"}


def test_estimates_are_no_surer_than_their_own_errors():
    rng = np.random.default_rng(7)
    base = drawn(rng)
    sharp, blunt = (
        ranking(
            table(**{name: {"kl": base * f, "kl_se": np.full(base.shape, se)} for name, f in (("a", 1.0), ("b", 1.1))}),
            "kl",
        )
        for se in (1e-4, 5.0)
    )
    assert sharp.pairs[0].better == "first" and blunt.pairs[0].better == "neither"


def test_one_document_proves_nothing():
    rng = np.random.default_rng(8)
    base = drawn(rng, documents=1)
    found = ranking(table(documents=1, a={"kl": base}, b={"kl": base * 9}), "kl")
    assert [place.text for place in found.places] == ["1-2", "1-2"]
    assert found.pairs[0].difference.method == "none"


def test_the_same_candidate_twice_is_tied():
    base = drawn(np.random.default_rng(9))
    assert ranking(table(a={"kl": base}, b={"kl": base}), "kl").place("b").tied == ["a"]


def test_one_candidate_has_the_first_place():
    found = ranking(table(a={"kl": drawn(np.random.default_rng(9))}), "kl")
    assert found.places[0].text == "1" and found.pairs == []


def test_metrics_of_windows_and_of_sizes_are_paired_too():
    rng = np.random.default_rng(10)
    top = rng.integers(0, 50, (24, 20))
    sides = {
        name: {"ref_top1": top, "cand_top1": np.where(rng.random((24, 20)) < rate, 60, top), "cand_nll": nll}
        for name, rate, nll in (("a", 0.02, drawn(rng)), ("b", 0.5, drawn(rng) + 1))
    }
    for metric in ("greedy_match_length", "bits_per_byte", "perplexity"):
        assert ranking(table(**sides), metric).pairs[0].better == "first"


def test_what_cannot_be_ranked_is_refused():
    base = drawn(np.random.default_rng(11))
    two = table(a={"kl": base}, b={"kl": base})
    with pytest.raises(UsageError, match="no better direction"):
        ranking(two, "delta_prob")
    with pytest.raises(UsageError, match="has no scores for tv"):
        ranking(two, "tv")
    sides = [next(iter(split_candidates(table(n, a={"kl": base[:n]})))) for n in (24, 23)]
    with pytest.raises(MismatchError, match="score both on the same text"):
        ranking_of(sides, "kl")
