"""The worst tokens and what stands before them, against plain loops over the table."""

import numpy as np
import pyarrow as pa
import pytest

from evalgate.errors import UsageError
from evalgate.gate.compare import sides
from evalgate.stats.worst import Token, worst_tokens
from evalgate.store.runs import Run
from tests.evalgate.sample_run import listed, source, summary, token_table

TEXTS = {i: f" w{i}" for i in range(0, 1000, 2)}  # odd ids have no text


def run_of(table, kind="kl", **changes):
    reference = None if kind == "ppl" else source("demo")
    return Run(summary=summary(table, kind=kind, reference=reference), table=table, manifest={}, **changes)


@pytest.fixture(scope="module")
def run():
    return run_of(token_table(("a", "b"), documents=6), token_texts=TEXTS)


def found(run, name="a", **options):
    return worst_tokens(run, sides(run, name)[0], **options)


def test_the_worst_come_first(run):
    rows = run.table.to_pylist()
    for name in ("a", "b"):
        wanted = sorted((r for r in rows if r["candidate"] == name), key=lambda r: -r["kl"])[:7]
        got = found(run, name, limit=7)
        assert [(t.window, t.position, t.token.id) for t in got.tokens] == [
            (r["window"], r["position"], r["token"]) for r in wanted
        ]
        assert [t.value for t in got.tokens] == [r["kl"] for r in wanted] == [t.kl for t in got.tokens]
        assert [t.document for t in got.tokens] == [r["document"] for r in wanted]
        assert (got.metric, got.positions, got.reference) == ("kl", 180, "demo")
        for one, row in zip(got.tokens, wanted, strict=True):
            expected = {side: np.exp(-row[f"{side}_nll"]) for side in ("ref", "cand")}
            assert one.probability == pytest.approx(expected)


@pytest.mark.parametrize(
    ("metric", "badness"),
    [
        ("topk_overlap", lambda r: -r["topk_overlap"]),
        ("delta_logprob", lambda r: abs(r["ref_nll"] - r["cand_nll"])),
        ("nll", lambda r: r["cand_nll"]),
    ],
)
def test_worse_is_what_the_metric_says(run, metric, badness):
    rows = [r for r in run.table.to_pylist() if r["candidate"] == "a"]
    wanted = max(rows, key=badness)
    one = found(run, metric=metric, limit=1).tokens[0]
    assert (one.window, one.position) == (wanted["window"], wanted["position"])


def test_text_before_is_of_the_same_window_and_gaps_are_seen(run):
    rows = {(r["window"], r["position"]): r["token"] for r in run.table.to_pylist() if r["candidate"] == "a"}
    for one in found(run, limit=40, context=5).tokens:
        places = [(one.window, p) for p in range(max(1, one.position - 5), one.position)]
        assert one.before == tuple(Token(rows[place], TEXTS.get(rows[place])) for place in places)
    sampled = run_of(run.table.filter(pa.array([p % 3 == 1 for p in run.table.column("position").to_pylist()])))
    one = next(t for t in found(sampled, limit=40, context=2).tokens if t.position > 7)
    assert [t is None for t in one.before] == [True, False, True, False][-len(one.before) :] or one.before[-1] is None
    assert one.before.count(None) == 2 and len(one.before) == 4


def test_only_a_domain(run):
    got = found(run, domain="code", limit=100)
    assert {t.domain for t in got.tokens} == {"code"} and got.positions == 90 == len(got.tokens)
    with pytest.raises(UsageError, match="use one of prose, code"):
        found(run, domain="poetry")


def test_likeliest_tokens_are_those_the_run_keeps(run):
    bare = found(run, limit=1).tokens[0]
    row = next(
        r
        for r in run.table.to_pylist()
        if (r["candidate"], r["window"], r["position"]) == ("a", bare.window, bare.position)
    )
    assert {side: [c.token.id for c in some] for side, some in bare.choices.items()} == {
        "ref": [row["ref_top1"]],
        "cand": [row["cand_top1"]],
    }
    assert all(c.probability is None for some in bare.choices.values() for c in some)
    at = run.table.to_pylist().index(row)
    kept = run_of(run.table, alternatives_table=listed(run.table, (at,), [([7, 4, 9], [-0.5, -1.0, -3.0])]))
    one = found(kept, limit=1, choices=2).tokens[0]
    assert [c.token.id for c in one.choices["cand"]] == [7, 4]
    assert [c.probability for c in one.choices["ref"]] == pytest.approx(np.exp([-0.5, -1.0]))
    other = found(kept, "b", limit=1).tokens[0]
    assert len(other.choices["ref"]) == 1  # the list is of the other candidate


def test_bounds_rank_by_the_lower_one():
    table = token_table(("a",))
    values = table.column("kl").to_numpy()
    table = table.drop_columns(["kl"]).append_column("kl_low", pa.array(values))
    got = found(run_of(table), limit=1)
    assert (got.series, got.exactness) == ("low", "bounded")
    assert got.tokens[0].kl == pytest.approx(values.max()) and got.tokens[0].kl_bounded


def test_a_model_alone_is_ranked_by_nll():
    got = found(run_of(token_table(("a",), pair=False), kind="ppl"), limit=3)
    assert (got.metric, got.reference) == ("nll", None)
    assert set(got.tokens[0].probability) == {"cand"} == set(got.tokens[0].choices) and got.tokens[0].kl is None


def test_a_metric_without_a_value_at_a_token_is_refused(run):
    for metric in ("greedy_match_length", "bits_per_byte"):
        with pytest.raises(UsageError, match=f"{metric} has no value at a single token"):
            found(run, metric=metric)
    with pytest.raises(UsageError, match="there is no metric"):
        found(run, metric="kudos")
