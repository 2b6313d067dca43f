from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from evalgate import metrics
from evalgate.errors import ScoreError, UsageError
from evalgate.metrics import Scores, split_candidates
from tests.evalgate.score_tables import columns, make_case, replaced, table, top

NAMES = {
    "nll", "perplexity", "bits_per_byte", "kl", "reverse_kl", "js", "tv", "delta_logprob", "delta_prob",
    "top1_agreement", "flip", "regret", "topk_overlap", "entropy", "greedy_match_length",
}  # fmt: skip
CASE = make_case()
DATA = columns(CASE)
TABLE = table(DATA)
FLOOR = 0.3


def one(whole: pa.Table, floor: float | None = FLOOR) -> Scores:
    (scores,) = split_candidates(whole, noise_floor=floor)
    return scores


def slow(name: str) -> dict[str, list[float]]:
    """What every series must hold, from the full distributions."""
    n = range(len(CASE.window))
    p_token = [CASE.p[i][CASE.token[i]] for i in n]
    q_token = [CASE.q[i][CASE.token[i]] for i in n]
    differs = [top(CASE.p[i], 1) != top(CASE.q[i], 1) for i in n]
    nll = {"cand": [-math.log(x) for x in q_token], "ref": [-math.log(x) for x in p_token]}
    change = [a - b for a, b in zip(nll["cand"], nll["ref"], strict=True)]
    if name == "nll":
        return {"value": nll["cand"], "reference": nll["ref"], "difference": change}
    if name == "perplexity":
        return {"candidate": nll["cand"], "reference": nll["ref"], "log_ratio": change}
    if name == "bits_per_byte":
        bits = {k: [x / math.log(2) for x in v] for k, v in nll.items()}
        return {"candidate": bits["cand"], "reference": bits["ref"], "difference": [x / math.log(2) for x in change]}
    if name == "entropy":
        a, b = DATA["cand_entropy"], DATA["ref_entropy"]
        return {"candidate": a, "reference": b, "difference": [x - y for x, y in zip(a, b, strict=True)]}
    if name == "delta_logprob":
        return {"value": [-x for x in change], "square": [x * x for x in change]}
    if name == "delta_prob":
        delta = [b - a for a, b in zip(p_token, q_token, strict=True)]
        return {"value": delta, "square": [x * x for x in delta]}
    if name == "top1_agreement":
        return {"value": [float(not x) for x in differs]}
    if name == "flip":
        return {"value": [float(x and DATA["ref_margin"][i] > FLOOR) for i, x in enumerate(differs)]}
    if name == "greedy_match_length":
        lengths = []
        for w in dict.fromkeys(CASE.window):
            flags = [differs[i] for i in n if CASE.window[i] == w]
            lengths.append(float(flags.index(True) if True in flags else len(flags)))
        return {"value": lengths}
    return {"value": DATA[name]}


def test_every_metric_of_the_contract_is_found_by_itself():
    assert set(metrics.registry()) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_series_are_what_the_full_distributions_give(name):
    found = metrics.get(name).series(one(TABLE))
    expected = slow(name)
    assert set(found) == set(expected)
    for key, values in expected.items():
        assert found[key].values.dtype == np.float64
        np.testing.assert_allclose(found[key].values, values, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_metric_declares_itself(name):
    metric = metrics.get(name)
    found = metric.series(one(TABLE))
    assert metric.primary in found
    assert metric.unit
    assert {s.series for s in metric.statistics} <= set(found) | {"low"}  # of estimates alone
    assert len({s.name for s in metric.statistics}) == len(metric.statistics)
    rows = {name: s.rows for name, s in found.items()}
    for key, series in found.items():
        assert len(series.values) == (len(rows[key]) if metric.per == "window" else TABLE.num_rows)
        assert np.isfinite(series.values).all()
    low, high = metric.support
    assert (found[metric.primary].values >= low).all() and (found[metric.primary].values <= high).all()


@pytest.mark.parametrize("name", sorted(NAMES))
def test_row_order_does_not_matter(name):
    order = np.random.default_rng(1).permutation(TABLE.num_rows)
    a, b = (metrics.get(name).series(one(t)) for t in (TABLE, TABLE.take(order)))
    for key in a:
        np.testing.assert_array_equal(a[key].values, b[key].values)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_bad_value_in_a_needed_column_is_named(name, bad):
    metric = metrics.get(name)
    column = metric.columns[0]
    if bad is not None and (column == "bytes" or column.endswith("top1")):
        column = "ref_margin" if name == "flip" else ""
    if not column:
        pytest.skip("integer column")
    values = list(DATA[column])
    values[5] = bad
    at = TABLE.column_names.index(column)
    broken = TABLE.set_column(at, TABLE.schema.field(at), pa.array(values, TABLE.schema.field(at).type))
    with pytest.raises(ScoreError, match=f"'cand', window {CASE.window[5]}, position {CASE.position[5]}") as caught:
        metric.series(one(broken))
    assert caught.value.context["window"] == CASE.window[5]


def test_bytes_weigh_bits_per_byte():
    series = metrics.get("bits_per_byte").series(one(TABLE))["candidate"]
    assert series.sizes is not None and series.sizes.tolist() == CASE.bytes


def test_flip_needs_a_floor_and_ignores_ties_at_it():
    flip = metrics.get("flip")
    assert flip.exactness(one(TABLE, None)) is None
    with pytest.raises(UsageError, match="noise floor"):
        flip.series(one(TABLE, None))
    at_zero = flip.series(one(TABLE, 0.0))["value"].values
    agreement = metrics.get("top1_agreement").series(one(TABLE))["value"].values
    np.testing.assert_array_equal(at_zero, 1 - agreement)
    assert not flip.series(one(TABLE, 100.0))["value"].values.any()


@pytest.mark.parametrize("name", ["kl", "js", "tv", "reverse_kl", "regret", "topk_overlap"])
def test_exactness_follows_the_columns(name):
    metric = metrics.get(name)
    low, high = [x * 0.5 for x in DATA[name]], [x * 2 for x in DATA[name]]
    assert metric.exactness(one(TABLE)) == "exact"
    estimated = one(replaced(TABLE, name, **{name: DATA[name], f"{name}_se": low}))
    assert metric.exactness(estimated) == "estimated"
    se = metric.series(estimated)["value"].se
    assert se is not None
    np.testing.assert_allclose(se, low, rtol=1e-6)
    bounded = one(replaced(TABLE, name, **{f"{name}_low": low, f"{name}_high": high}))
    assert metric.exactness(bounded) == "bounded"
    assert set(metric.series(bounded)) == {"low", "high"}
    unbounded = one(replaced(TABLE, name, **{f"{name}_low": low, f"{name}_high": [None, *high[1:]]}))
    assert set(metric.series(unbounded)) == {"low"}
    with pytest.raises(ScoreError, match=f"{name}_low is above"):
        metric.series(one(replaced(TABLE, name, **{f"{name}_low": high, f"{name}_high": low})))
    assert metric.exactness(one(TABLE.drop_columns([name]))) is None


def test_candidates_of_different_exactness_share_a_table():
    second = table(columns(CASE, candidate="endpoint"))
    second = replaced(second, "kl", kl=[None] * TABLE.num_rows, kl_low=DATA["kl"])
    both = pa.concat_tables([TABLE, second], promote_options="default")
    found = {s.candidate: metrics.get("kl").exactness(s) for s in split_candidates(both)}
    assert found == {"cand": "exact", "endpoint": "bounded"}


def test_duplicate_and_empty_tables_are_refused():
    with pytest.raises(ScoreError, match="twice"):
        list(split_candidates(pa.concat_tables([TABLE, TABLE.slice(3, 1)])))
    with pytest.raises(ScoreError, match="no rows"):
        list(split_candidates(TABLE.slice(0, 0)))


def test_an_unknown_metric_names_the_one_that_was_meant_or_all():
    with pytest.raises(UsageError, match=r"there is no metric 'kld': did you mean kl\?"):
        metrics.get("kld")
    with pytest.raises(UsageError, match="perplexity"):
        metrics.get("something")


def test_greedy_match_length_of_a_window_that_never_disagrees_is_its_length():
    same = {**DATA, "cand_top1": DATA["ref_top1"]}
    values = metrics.get("greedy_match_length").series(one(table(same)))["value"].values
    assert values.tolist() == [CASE.window.count(w) for w in dict.fromkeys(CASE.window)]


def test_a_column_in_many_chunks_is_one_column(monkeypatch):
    """Columns are widened a stretch at a time; stretches and chunks may end anywhere."""
    monkeypatch.setattr("evalgate.metrics._scores._STEP", 3)
    whole = table(columns(make_case()))
    parts = pa.concat_tables([whole.slice(0, 5), whole.slice(5, 0), whole.slice(5)])
    (one,), (many,) = list(split_candidates(whole)), list(split_candidates(parts))
    for name in ("window", "position", "document", "domain"):
        assert np.array_equal(getattr(one, name), getattr(many, name))
    assert np.array_equal(one.floats("kl"), whole.column("kl").to_numpy().astype(np.float64))
    assert np.array_equal(many.floats("kl"), one.floats("kl"))
    assert np.array_equal(many.integers("bytes"), one.integers("bytes"))


def test_the_first_bad_row_is_named_wherever_its_stretch_begins(monkeypatch):
    monkeypatch.setattr("evalgate.metrics._columns._STEP", 4)
    whole = table(columns(make_case()))
    values = whole.column("kl").to_pylist()
    values[9], values[14] = -1.0, -2.0
    broken = replaced(whole, "kl", kl=values)
    with pytest.raises(ScoreError, match=r"has -1 in column 'kl' at row 9 \(2 such rows\)"):
        metrics.check_table(broken)
