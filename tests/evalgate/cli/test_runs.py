"""`evalgate slices`, `plan` and `compare` on stored runs, checked against the statistics beneath."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from evalgate.cli.app import invoke
from evalgate.core import Limits
from evalgate.errors import MismatchError, UsageError
from evalgate.gate.compare import paired_runs
from evalgate.gate.guarded import Guarded
from evalgate.gate.oneline import one_rule
from evalgate.gate.plan import plan
from evalgate.gate.policy import resolve
from evalgate.metrics import Series, mean
from evalgate.stats.clustered import clustered_mean
from evalgate.stats.intervals import Sample
from evalgate.stats.mcnemar import mcnemar
from evalgate.stats.samplesize import documents_needed
from evalgate.store.runs import Run, read_run, write_run
from tests.evalgate.cli.test_cli import MemoryOutput
from tests.evalgate.sample_run import source, summary, token_table

TABLE = token_table(("demo@int8",), documents=12)
STATISTIC = mean()
TEXTS = {i: " word" if i % 2 else "+=" for i in range(1000)}


def put(table, name, values):
    field = table.schema.field(name)
    return table.set_column(table.schema.get_field_index(name), field, pa.array(values).cast(field.type))


def run_of(table, **reference):
    return Run(summary=summary(table, reference=source("demo", **reference)), table=table, manifest={})


def store(path, table, texts=TEXTS):
    write_run(path, manifest={}, table=table, summary=summary(table, reference=source("demo")), token_texts=texts)
    return str(path)


def call(*args):
    output = MemoryOutput()
    return invoke(args, output), output.text


def values(table, name):
    return table.column(name).to_numpy().astype(np.float64)


DOCUMENTS = np.repeat(np.arange(12), 30)


def test_token_texts_travel_with_the_run(tmp_path):
    assert read_run(tmp_path / store(tmp_path / "r", TABLE)).token_texts == TEXTS
    store(tmp_path / "without", TABLE, texts=None)
    assert read_run(tmp_path / "without").token_texts is None
    (tmp_path / "r" / "token_texts.parquet").unlink()
    assert call("slices", str(tmp_path / "r"))[0] == 2


@pytest.mark.parametrize("by", ["domain", "position", "entropy", "token", "document"])
def test_slices(tmp_path, by):
    run = store(tmp_path / "r", TABLE)
    code, text = call("slices", run, "--by", by)
    assert code == 0 and text.startswith(f"kl of demo@int8 by {by}; 95 %")
    body = json.loads(call("slices", run, "--by", by, "--json")[1])
    assert body["overall"] == pytest.approx(values(TABLE, "kl").mean())
    assert sum(s["estimate"]["n"] for s in body["slices"]) == 360
    if by == "token":
        token = TABLE.column("token").to_numpy()
        named = {s["name"]: s["estimate"]["value"] for s in body["slices"]}
        assert named == {
            "word": pytest.approx(values(TABLE, "kl")[token % 2 == 1].mean()),
            "code": pytest.approx(values(TABLE, "kl")[token % 2 == 0].mean()),
        }


def test_a_broken_slice_stands_out(tmp_path):
    table = token_table(("demo@int8",), documents=48)
    kl = values(table, "kl")
    kl[np.arange(len(kl)) // 30 % 2 == 1] *= 10
    code, text = call("slices", store(tmp_path / "r", put(table, "kl", kl)))
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith(("code", "prose"))}
    assert code == 0 and lines["code"].endswith("*") and text.index("code") < text.index("prose")


def test_slices_say_what_is_missing(tmp_path, capsys):
    run = store(tmp_path / "r", TABLE, texts=None)
    for args, part in (
        (["--by", "token"], "tokens' texts"),
        (["--metric", "klx"], "there is no metric"),
        (["--candidate", "other"], "has no candidate 'other': use one of demo@int8"),
    ):
        assert call("slices", run, *args) == (2, "")
        assert part in capsys.readouterr().err


def test_limits_are_read():
    assert one_rule("max", "kl=0.01").text == "kl mean <= 0.01"
    assert one_rule("max", "kl.p99.9=0.5").text == "kl p99.9 <= 0.5"
    assert one_rule("min", "top1_agreement=0.97").text == "top1_agreement mean >= 0.97"
    for text in ("kl", "kl=", "kl=x", "kl=nan", "=1", "klx=1", "kl.avg=1"):
        with pytest.raises(UsageError):
            one_rule("max", text)


def scores():
    from evalgate.gate.compare import sides

    return sides(run_of(TABLE), None)[0]


def needed(values, limits, wanted, *, statistic=STATISTIC, support=(0.0, np.inf), ideal=0.0, share=False, power=0.9):
    """Documents with which the gate's rule gives a verdict on TABLE's documents, drawn again: 12 of 30 positions."""
    totals, sizes = values.reshape(12, 30).sum(axis=1), np.full(12, 30.0)

    def decided(drawn):
        sample = Sample(Series(totals[drawn], sizes=sizes[drawn]), np.arange(len(drawn)), support=support)
        return Guarded(sample, statistic, ideal=ideal, share=share).verdict(limits, confidence=0.95) == wanted

    return documents_needed(decided, pilot=12, power=power, seed=0)


def test_a_plan_is_what_the_gate_s_own_rule_needs():
    kl = values(TABLE, "kl")
    found = plan(one_rule("max", "kl=0.02"), scores(), power=0.8)
    assert (found.verdict, found.documents) == ("pass", needed(kl, Limits(None, 0.02), "pass", power=0.8))
    assert found.value == pytest.approx(kl.mean())


def test_a_plan_for_a_percentile_settles_the_share_beyond_its_limit():
    kl = values(TABLE, "kl")
    tail = plan(one_rule("max", "kl.p90=0.1"), scores())
    share = needed((kl > 0.1).astype(float), Limits(None, 0.1), "pass", support=(0.0, 1.0), share=True)
    assert (tail.verdict, tail.documents) == ("pass", share)
    assert tail.value == pytest.approx(np.percentile(kl, 90))


def test_a_plan_knows_the_ideal_and_the_scale_of_its_figure():
    agree = (values(TABLE, "ref_top1") == values(TABLE, "cand_top1")).astype(float)
    high = plan(one_rule("min", "top1_agreement=0.9"), scores())
    assert high.documents == needed(agree, Limits(0.9, None), "fail", support=(0.0, 1.0), ideal=1.0)
    assert high.verdict == "fail"
    assert plan(one_rule("min", "top1_agreement=0.1"), scores()).verdict == "pass"
    ratio = plan(one_rule("max", "perplexity.ratio=1.05"), scores())
    step = values(TABLE, "cand_nll") - values(TABLE, "ref_nll")
    assert ratio.value == pytest.approx(np.exp(step.mean()))
    metric, statistic = resolve(one_rule("max", "perplexity.ratio=1.05"))
    asked = Limits(None, 1.05)
    assert ratio.documents == needed(step, asked, "pass", statistic=statistic, support=metric.support)


def test_plan_on_the_command_line(tmp_path, capsys):
    run = store(tmp_path / "r", TABLE)
    code, text = call("plan", run, "--max", "kl=0.02", "--min", "top1_agreement=0.9")
    assert code == 0 and "kl mean" in text and "points to" in text
    body = json.loads(call("plan", run, "--max", "kl=0.02", "--json")[1])
    assert body["plans"][0]["pilot_documents"] == 12
    assert call("plan", run, "--max", "kl")[0] == 2
    assert call("plan", run)[0] == 2 and "give --max METRIC=VALUE" in capsys.readouterr().err
    assert call("plan", run, "--max", "kl=0.02", "--power", "2")[0] == 2
    assert call("plan", run, "--max", "kl=-1")[0] == 2 and "kl is at least 0" in capsys.readouterr().err
    assert call("plan", run, "--max", "perplexity.ratio=0")[0] == 2


def better(table):
    """The same candidate with half the KL and a right pick wherever the first is wrong in every third row."""
    cand = table.column("cand_top1").to_numpy().copy()
    cand[::3] = table.column("ref_top1").to_numpy()[::3]
    return put(put(table, "kl", values(table, "kl") / 2), "cand_top1", cand)


def test_compare_is_paired():
    new, old = run_of(better(TABLE)), run_of(TABLE)
    (found,) = paired_runs(new, old)
    figures = {f.metric: f for f in found.figures}
    wanted = clustered_mean(values(new.table, "kl") - values(TABLE, "kl"), DOCUMENTS)
    kl = figures["kl"]
    own = kl.difference
    assert (own.value, own.low, own.high) == pytest.approx((wanted.value, wanted.low, wanted.high))
    assert kl.winner == "first" and figures["top1_agreement"].winner == "first" and figures["js"].winner == "neither"
    agrees = [values(r.table, "ref_top1") == values(r.table, "cand_top1") for r in (new, old)]
    assert found.agreement == mcnemar(*agrees, documents=DOCUMENTS, seed=0)
    assert found.agreement.only_second == 0 and found.agreement.clustered_p < 0.01
    assert {f.metric: f.winner for f in paired_runs(old, new)[0].figures}["kl"] == "second"


def test_what_cannot_be_compared_is_refused():
    other = put(TABLE, "token", TABLE.column("token").to_numpy() + 1)
    with pytest.raises(MismatchError, match="not the same token"):
        paired_runs(run_of(TABLE), run_of(other))
    with pytest.raises(MismatchError, match="different references"):
        paired_runs(run_of(TABLE), run_of(TABLE, weights_hash="f" * 32))
    two = run_of(token_table(("a", "b"), documents=12))
    with pytest.raises(UsageError, match="no candidate 'c': use one of a, b"):
        paired_runs(two, two, candidates=("c", None))
    with pytest.raises(UsageError, match="no candidate of the first run has a namesake"):
        paired_runs(two, run_of(token_table(("c", "d"), documents=12)))
    bounded = TABLE.rename_columns(["kl_low" if n == "kl" else n for n in TABLE.column_names])
    names = [f.metric for f in paired_runs(run_of(TABLE), replace(run_of(TABLE), table=bounded))[0].figures]
    assert "kl" not in names and "tv" in names


def test_compare_on_the_command_line(tmp_path):
    runs = [store(tmp_path / "new", better(TABLE)), store(tmp_path / "old", TABLE)]
    code, text = call("compare", *runs)
    assert code == 0 and "McNemar p = " in text
    assert next(line for line in text.splitlines() if line.startswith("kl ")).endswith("first")
    body = json.loads(call("compare", *runs, "--metric", "kl", "--json")[1])
    assert [f["metric"] for f in body["figures"]] == ["kl"] and body["agreement"]["only_second"] == 0
    assert call("compare", *runs, "--metric", "klx")[0] == 2


def test_several_candidates_are_all_done_unless_one_is_named(tmp_path):
    two = store(tmp_path / "two", token_table(("a", "b"), documents=12))
    for command in (["slices", two], ["plan", two, "--max", "kl=0.02"]):
        code, text = call(*command)
        assert code == 0
        alone = [call(*command, "--candidate", name)[1] for name in "ab"]
        assert text == "\n".join(alone)
        body = json.loads(call(*command, "--json")[1])
        assert [document["candidate"] for document in body["candidates"]] == ["a", "b"]
        assert json.loads(call(*command, "--candidate", "b", "--json")[1]) == body["candidates"][1]
    both = json.loads(call("compare", two, two, "--metric", "kl", "--json")[1])["candidates"]
    assert [(pair["first"], pair["second"]) for pair in both] == [("a", "a"), ("b", "b")]


def test_a_single_candidate_is_compared_with_each_of_the_other_side():
    both, second = token_table(("a", "b"), documents=12), run_of(token_table(("a",), documents=12))
    assert [(p.first, p.second) for p in paired_runs(second, second)] == [("a", "a")]
    tokens = both.column("token").to_numpy() + np.repeat([0, 1], 360)  # b, of other tokens, is refused and a is not
    first = run_of(put(both, "token", tokens))
    assert [(p.first, p.second) for p in paired_runs(first, second, candidates=("a", None))] == [("a", "a")]
    with pytest.raises(MismatchError):
        paired_runs(first, second)
