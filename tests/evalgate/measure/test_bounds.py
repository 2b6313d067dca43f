"""Intervals from two sides' lists against the full distributions, in float64 and without the code under test."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalgate.core import Window
from evalgate.dialects.base import Ask, Capabilities, Place
from evalgate.dialects.rows import Entry, score_position, window_scores
from evalgate.errors import ScoreError
from evalgate.measure.bounds import narrowed, pair_columns, side_columns, tv_width, unknown_counts, wide_table
from evalgate.probe.quantum import Quantum, with_excess

VOCAB = 40


def distributions(seed, n, sharpness):
    random = np.random.default_rng(seed)
    logits = random.normal(scale=sharpness, size=(n, VOCAB))
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def answers(window, logprobs, k, *, forced=True, wanted=None):
    """What an endpoint with a list of k says about every position; unforced, an unlisted actual token is censored."""
    ask = Ask(model="m", k=k, wanted=wanted or {}, vocab_size=VOCAB)
    rows = []
    for row, position in zip(logprobs, window.positions, strict=True):
        order = np.lexsort((np.arange(VOCAB), -row))[:k]
        entries = [Entry(frozenset({int(i)}), float(row[i])) for i in order]
        token = window.ids[position]
        if forced:
            entries.insert(0, Entry(frozenset({token}), float(row[token]), beside=True))
        entries += [Entry(frozenset({t}), float(row[t]), beside=True) for t in ask.wanted.get(position, ())]
        rows.append(score_position(token, entries, ask, Place("/x", window.index, position)))
    return window_scores(window, ask, rows, text_keyed=False)


def window_of(n, seed=0, index=0, document="d"):
    ids = tuple(int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, n + 1))
    return Window(index, document, "x", ids, 1, n + 1, (1,) * (n + 1))


def exact(p, q):
    m = (np.exp(p) + np.exp(q)) / 2
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    tv = np.abs(np.exp(p) - np.exp(q)).sum(axis=1) / 2
    js = ((np.exp(p) * (p - np.log(m))).sum(axis=1) + (np.exp(q) * (q - np.log(m))).sum(axis=1)) / 2
    return kl, tv, js


@pytest.mark.parametrize("quanta", [(None, Quantum("decimal", 2)), (Quantum("decimal", 2), None)])
def test_a_rounding_side_breaks_no_interval(quanta):
    """The same distribution on both sides, printed with two decimals by one: nothing may prove a difference."""
    window = window_of(40)
    p = distributions(3, 40, 2.0)
    sides = [p if quantum is None else np.round(p, 2) for quantum in quanta]
    ref, cand = (answers(window, side, 12) for side in sides)
    taken_as_exact = pair_columns(window, ref, cand, by_id=(True, True))
    found = pair_columns(window, ref, cand, by_id=(True, True), quanta=quanta)
    assert max(taken_as_exact["tv_low"]) > 1e-4 and max(taken_as_exact["kl_low"]) > 0
    assert max(found["kl_low"]) < 1e-9 and max(found["tv_low"]) < 1e-9 and max(found["js_low"]) < 1e-9
    assert all(wide >= narrow for wide, narrow in zip(found["tv_high"], taken_as_exact["tv_high"], strict=True))


def test_probabilities_above_1_in_sum_pass_no_bound():
    """One side's probabilities add up to 1.001, as llama.cpp's may: the truth stays inside all intervals."""
    window, excess = window_of(40), 1e-3
    p, q = distributions(3, 40, 2.0), distributions(4, 40, 2.0)
    ref = answers(window, p, 12)
    same = answers(window, np.minimum(p + np.log1p(excess), 0.0), 12)
    taken_as_right = pair_columns(window, ref, same, by_id=(True, True))
    assert max(taken_as_right["tv_low"]) > 1e-4
    counted = (None, with_excess(None, np.log1p(excess)))
    found = pair_columns(window, ref, same, by_id=(True, True), quanta=counted)
    assert max(found["kl_low"]) < 1e-9 and max(found["tv_low"]) < 1e-9 and max(found["js_low"]) < 1e-9
    true_nll = [-q[row, window.ids[position]] for row, position in enumerate(window.positions)]
    cand = answers(window, np.minimum(q + np.log1p(excess), 0.0), 12)
    found = pair_columns(window, ref, cand, by_id=(True, True), quanta=counted)
    ends = list(zip(found["cand_nll_low"], true_nll, found["cand_nll_high"], strict=True))
    assert all(low - 1e-12 <= true <= high + 1e-12 for low, true, high in ends) and set(found["cand_nll"]) == {None}
    assert None not in found["ref_nll"]  # the other side stays exact
    for name, truth in zip(("tv", "js"), exact(p, q)[1:], strict=True):
        assert (np.array(found[f"{name}_low"]) <= truth + 1e-9).all() and (truth <= found[f"{name}_high"]).all()
    assert (np.array(found["kl_low"]) <= exact(p, q)[0] + 1e-9).all()


def test_a_whole_list_has_its_excess_taken_off():
    window, q = window_of(3), distributions(4, 3, 1.0)
    ask = Ask(model="m", k=VOCAB, vocab_size=VOCAB, capabilities=Capabilities(excess=4e-3))
    entries = [Entry(frozenset({i}), float(v + np.log1p(2e-3))) for i, v in enumerate(q[0])]
    row = score_position(window.ids[1], entries, ask, Place("/x", 0, 1))
    assert row.chosen.low == pytest.approx(q[0, window.ids[1]], abs=1e-12)
    assert sorted(row.top_logprobs) == pytest.approx(sorted(q[0]), abs=1e-12)


def test_the_least_regret_counts_the_rounding():
    """The candidate's choice is outside the reference's list: it costs at least the list's depth less two roundings."""
    window = window_of(1)
    p, q = np.log(np.full((1, VOCAB), 0.4 / 38)), np.log(np.full((1, VOCAB), 0.01))
    p[0, :2], q[0, 30] = np.log([0.4, 0.2]), np.log(0.61)
    ref, cand = answers(window, np.round(p, 1), 2, forced=False), answers(window, q, 2, forced=False)
    low = pair_columns(window, ref, cand, by_id=(True, True), quanta=(Quantum("decimal", 1), None))["regret_low"]
    assert low == pytest.approx([0.7 - 0.1])  # printed -0.9 and -1.6


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, VOCAB), st.floats(0.1, 6), st.floats(0, 2), st.booleans())
def test_the_truth_lies_inside(seed, k, sharpness, apart, union):
    window = window_of(5, seed)
    p = distributions(seed, 5, sharpness)
    moved = p + apart * np.random.default_rng(seed + 1).normal(size=p.shape)
    q = moved - np.log(np.exp(moved).sum(axis=1, keepdims=True))
    cand = answers(window, q, k)
    wanted = {r.position: r.top_ids for r in cand.rows} if union else {}
    ref = answers(window, p, k, wanted=wanted)
    found = pair_columns(window, ref, cand, by_id=(True, True))
    kl, tv, js = exact(p, q)
    for i in range(5):
        assert found["kl_low"][i] <= kl[i] + 1e-9
        assert found["tv_low"][i] - 1e-9 <= tv[i] <= found["tv_high"][i] + 1e-9
        assert found["js_low"][i] - 1e-9 <= js[i] <= found["js_high"][i] + 1e-9
        assert found["ref_nll"][i] == pytest.approx(-p[i, window.ids[i + 1]])
        assert found["cand_nll"][i] == pytest.approx(-q[i, window.ids[i + 1]])
        assert found["top1_agreement"][i] == float(p[i].argmax() == q[i].argmax())
        regret = p[i].max() - p[i, q[i].argmax()]
        assert found["regret_low"][i] <= regret + 1e-9
        assert found["regret_high"][i] is None or found["regret_high"][i] >= regret - 1e-9
        if k >= 10:
            mine, theirs = (set(np.argsort(-row, kind="stable")[:10]) for row in (p[i], q[i]))
            assert found["topk_overlap"][i] == pytest.approx(len(mine & theirs) / 10)
    if k == VOCAB:
        assert found["kl_low"] == pytest.approx(kl, abs=1e-5)
        assert found["tv_high"] == pytest.approx(tv, abs=1e-5)


@given(st.integers(0, 1000), st.integers(2, 12))
@settings(max_examples=30, deadline=None)
def test_asking_for_the_others_ids_never_widens(seed, k):
    window, p, q = window_of(4, seed), distributions(seed, 4, 2.0), distributions(seed + 7, 4, 2.0)
    cand = answers(window, q, k)
    plain = pair_columns(window, answers(window, p, k), cand, by_id=(True, True))
    wanted = {r.position: r.top_ids for r in cand.rows}
    more = pair_columns(window, answers(window, p, k, wanted=wanted), cand, by_id=(True, True))
    for i in range(4):
        assert more["kl_low"][i] >= plain["kl_low"][i] - 1e-9
        assert more["tv_high"][i] <= plain["tv_high"][i] + 1e-9
        assert more["js_high"][i] <= plain["js_high"][i] + 1e-9


def test_a_censored_token_is_an_interval_of_nll():
    window, q = window_of(6, 3), distributions(3, 6, 2.0)
    columns = side_columns(answers(window, q, 2, forced=False), "cand", by_id=True)
    for i, value in enumerate(columns["cand_nll"]):
        truth = -q[i, window.ids[i + 1]]
        assert value == pytest.approx(truth) if value is not None else columns["cand_nll_high"][i] is None
        assert columns["cand_nll_low"][i] <= truth + 1e-9
    assert None in columns["cand_nll"]


def test_a_tie_through_the_end_of_the_list_is_unknown():
    window = window_of(1)
    flat = np.full((1, VOCAB), -math.log(VOCAB))
    sharp = distributions(1, 1, 3.0)
    ref, cand = answers(window, flat, 12), answers(window, sharp, 12)
    vague = pair_columns(window, ref, cand, by_id=(False, True))
    assert (vague["top1_agreement"], vague["ref_top1"], vague["topk_overlap"]) == ([None], [None], [None])
    assert (vague["top1_agreement_low"], vague["top1_agreement_high"]) == ([0.0], [1.0])
    known = pair_columns(window, ref, cand, by_id=(True, True))
    assert known["ref_top1"] == [0]


def test_masses_over_one_are_refused_by_place():
    window = window_of(2, index=9)
    good = distributions(0, 2, 1.0)
    ref = answers(window, good, 5)
    bad = answers(window, good, 5)
    row = bad.rows[1]
    heavy = type(row)(**{**{f: getattr(row, f) for f in row.__slots__}, "top_logprobs": (-0.01,) * 5})
    broken = type(bad)(bad.window, bad.document, bad.k, (bad.rows[0], heavy), False)
    with pytest.raises(ScoreError, match="window 9, position 2"):
        pair_columns(window, ref, broken, by_id=(True, True))


def test_narrowing_keeps_what_is_known_everywhere_per_candidate():
    window, p, q = window_of(8, 5), distributions(5, 8, 2.0), distributions(6, 8, 2.0)
    ref = answers(window, p, 3)
    columns = {
        "forced": pair_columns(window, ref, answers(window, q, 3), by_id=(True, True)),
        "censored": pair_columns(window, ref, answers(window, q, 3, forced=False), by_id=(True, True)),
    }
    wide = wide_table(window, columns)
    missing = columns["censored"]["cand_nll"].count(None)
    assert missing and unknown_counts(wide)["cand_nll"] == missing
    frame = narrowed(wide).to_pandas()
    one, two = (frame[frame.candidate == name] for name in columns)
    assert one.cand_nll.notna().all() and one.cand_nll_low.isna().all()
    assert two.cand_nll.isna().all() and two.cand_nll_low.notna().all()
    assert "kl_high" not in frame and frame.kl_low.notna().all() and frame.tv_high.notna().all()


def test_the_table_reaches_the_metrics_as_intervals():
    from evalgate.stats.summarize import summarize

    tables = []
    for index in range(4):
        window = window_of(8, index, index, f"d{index}")
        p, q = distributions(index, 8, 2.0), distributions(index + 50, 8, 2.0)
        columns = pair_columns(window, answers(window, p, 3), answers(window, q, 3, forced=False), by_id=(True, False))
        tables.append(wide_table(window, {"c": columns}))
    import pyarrow as pa

    table = narrowed(pa.concat_tables(tables).unify_dictionaries().combine_chunks())
    ((_, group, _),) = summarize(table, kind="kl", noise_floor=0.0)
    found = group.metrics
    assert {found[n].exactness for n in ("kl", "tv", "js", "nll", "perplexity", "bits_per_byte")} == {"bounded"}
    assert not {"delta_prob", "delta_logprob", "entropy"} & set(found)
    low = table.column("cand_nll_low").to_numpy().astype(float)
    assert found["nll"].statistics["mean_low"].value == pytest.approx(low.mean(), rel=1e-6)
    assert found["perplexity"].statistics["candidate_low"].value == pytest.approx(math.exp(low.mean()), rel=1e-6)
    assert "candidate_high" not in found["perplexity"].statistics


@given(st.integers(0, 1000), st.integers(1, 12))
@settings(max_examples=20, deadline=None)
def test_the_width_at_the_lists_own_k_is_that_of_the_interval(seed, k):
    window, p, q = window_of(3, seed), distributions(seed, 3, 2.0), distributions(seed + 7, 3, 2.0)
    cand = answers(window, q, k)
    ref = answers(window, p, k, wanted={r.position: r.top_ids for r in cand.rows})
    found = pair_columns(window, ref, cand, by_id=(True, True))
    for i, (a, b) in enumerate(zip(ref.rows, cand.rows, strict=True)):
        assert tv_width(a, b, k) == pytest.approx(found["tv_high"][i] - found["tv_low"][i], abs=1e-5)
        assert tv_width(a, b, max(1, k // 2)) >= tv_width(a, b, k) - 1e-9
