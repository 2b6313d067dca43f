"""Run folders whose digests are right and whose contents cannot be."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from evalgate.cli.app import invoke
from evalgate.errors import InputError
from evalgate.measure.stored import read_run
from evalgate.metrics import check_table, registry
from evalgate.stats.ranking import ranking
from evalgate.store.runs import write_run
from evalgate.table import KEY_COLUMNS, RANGES, TEXT_COLUMNS, schema
from tests.evalgate.cli.test_cli import MemoryOutput
from tests.evalgate.sample_run import reseal, source, summary, token_table

ROW = 37  # of the first candidate: window 1, position 8


@pytest.fixture
def folder(tmp_path, table, document):
    return write_run(tmp_path / "run", manifest={"seed": 0}, table=table, summary=document).folder


def put(folder, name, value, row=ROW):
    """Write one value of the stored table and reseal the folder."""
    table = pq.read_table(folder / "tokens.parquet")
    column = table.column(name)
    here = pa.array(np.arange(table.num_rows) == row)
    changed = pc.if_else(here, pa.scalar(value, column.type), column)
    pq.write_table(table.set_column(table.column_names.index(name), name, changed), folder / "tokens.parquet")
    reseal(folder)


def restate(folder, change):
    """Change the stored summary and reseal the folder."""
    found = json.loads((folder / "summary.json").read_text())
    change(found)
    (folder / "summary.json").write_text(json.dumps(found))
    reseal(folder)


def test_a_run_as_it_was_written_is_read(folder, document):
    assert read_run(folder).summary == document


def test_every_column_has_a_range():
    owned = [name for metric in registry().values() for name in metric.ranges]
    assert len(owned) == len(set(owned))
    for name in schema(pair=True).names:
        base = name.removeprefix("ref_").removeprefix("cand_")
        assert name in TEXT_COLUMNS or base in owned or name in RANGES or base in RANGES, name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kl", -5.0),
        ("reverse_kl", -1e-6),
        ("js", 0.7),
        ("js", float("nan")),
        ("tv", 1.5),
        ("regret", float("inf")),
        ("topk_overlap", 1.01),
        ("cand_nll", -0.5),
        ("ref_nll", float("nan")),
        ("cand_entropy", -1.0),
        ("ref_margin", -0.1),
        ("cand_top1", -1),
        ("cand_rank", 0),
        ("ref_rank_of_cand_top1", 0),
        ("position", 0),
        ("bytes", -4),
        ("window", -1),
        ("token", -7),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_file_column_and_row(folder, name, value):
    put(folder, name, value)
    with pytest.raises(InputError, match=rf"tokens\.parquet has \S+ in column '{name}' at row {ROW}, which holds"):
        read_run(folder)


def test_ends_of_ranges_are_inside(table):
    limits = {"kl": 0.0, "js": float(np.float32(np.log(2))), "tv": 1.0, "topk_overlap": 0.0, "cand_nll": 0.0}
    for name, value in limits.items():
        values = pa.array(np.full(table.num_rows, value), pa.float32())
        check_table(table.set_column(table.column_names.index(name), name, values))


def bounded(table, low, high):
    ends = {"top1_agreement_low": low, "top1_agreement_high": high}
    for name, value in ends.items():
        table = table.append_column(name, pa.array(np.full(table.num_rows, value), pa.float32()))
    return table


def test_half_an_agreement_and_crossed_ends_are_refused(table):
    check_table(bounded(table, 0.0, 1.0))
    with pytest.raises(Exception, match=r"0\.5 in column 'top1_agreement_high' at row 0 .*whole numbers of \[0, 1\]"):
        check_table(bounded(table, 0.0, 0.5))
    with pytest.raises(Exception, match=r"1 in column 'top1_agreement_low' at row 0 .*at most top1_agreement_high, 0"):
        check_table(bounded(table, 1.0, 0.0))


def test_an_estimate_may_be_negative_and_its_error_may_not(table):
    n = table.num_rows
    estimated = table.set_column(table.column_names.index("kl"), "kl", pa.array(np.full(n, -0.2), pa.float32()))
    check_table(estimated.append_column("kl_se", pa.array(np.full(n, 0.3), pa.float32())))
    with pytest.raises(Exception, match=r"-0\.3 in column 'kl_se'"):
        check_table(estimated.append_column("kl_se", pa.array(np.full(n, -0.3), pa.float32())))


@pytest.mark.parametrize("name", KEY_COLUMNS)
def test_a_missing_key_column_is_named(folder, name):
    pq.write_table(pq.read_table(folder / "tokens.parquet").drop_columns([name]), folder / "tokens.parquet")
    reseal(folder)
    with pytest.raises(InputError, match=rf"tokens\.parquet has no column '{name}'"):
        read_run(folder)


@pytest.mark.parametrize(("name", "kind"), [("kl", "float"), ("window", "int32")])
def test_a_column_of_strings_is_named(folder, name, kind):
    table = pq.read_table(folder / "tokens.parquet")
    texts = pa.array(["x"] * table.num_rows)
    changed = table.set_column(table.column_names.index(name), name, texts)
    pq.write_table(changed, folder / "tokens.parquet")
    reseal(folder)
    with pytest.raises(InputError, match=rf"tokens\.parquet has string where the column '{name}' holds {kind}"):
        read_run(folder)


def overall(document, metric="kl"):
    return document["comparisons"][0]["overall"]["metrics"][metric]["statistics"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: overall(d)["mean"].update(value=0.001, low=0.0),
            r"says 0\.001 for kl\.mean of demo@int8 \(overall\)",
        ),
        (lambda d: overall(d)["p99"].update(value=0.2, high=0.3), r"says 0\.2 for kl\.p99"),
        (lambda d: overall(d)["mean"].update(low=0.5, high=0.6), r"an interval from 0\.5 to 0\.6"),
        (lambda d: d["comparisons"][0]["overall"].update(positions=7), r"says 7 positions of demo@int8"),
        (lambda d: d["comparisons"][0]["domains"][0].update(name="law"), "lists other domains"),
        (lambda d: d["comparisons"].pop(), r"lists the candidates demo@int8 where the table has demo@int8, demo@bf16"),
        (lambda d: overall(d).update(p42=overall(d)["mean"]), r"gives kl\.p42 .*, which the table does not have"),
        (
            lambda d: overall(d, "perplexity")["candidate"].update(value=1.0, low=0.5),
            r"says 1 for perplexity\.candidate",
        ),
        (lambda d: overall(d)["mean"].update(value=float("nan")), "NaN is not a number"),
    ],
)
def test_a_summary_that_its_table_does_not_give_is_refused(folder, change, message):
    restate(folder, change)
    with pytest.raises(InputError, match=rf"summary\.json .*{message}"):
        read_run(folder)


def test_every_command_that_reads_a_run_refuses_it(folder, tmp_path, capsys):
    put(folder, "kl", -5.0)
    (tmp_path / "policy.toml").write_text('[[rules]]\nmetric = "kl"\nmax = 0.1\n')
    commands = [
        ["show", str(folder)],
        ["slices", str(folder), "--candidate", "demo@int8"],
        ["compare", str(folder), str(folder), "--candidate-a", "demo@int8", "--candidate-b", "demo@bf16"],
        ["plan", str(folder), "--max", "kl=0.1", "--candidate", "demo@int8"],
        ["gate", "--run", str(folder), "--policy", str(tmp_path / "policy.toml")],
    ]
    for command in commands:
        output = MemoryOutput()
        assert invoke(command, output) == 2, command
        said = " ".join(capsys.readouterr().err.split())
        assert f"tokens.parquet has -5 in column 'kl' at row {ROW}" in said, command


@pytest.fixture
def ranked(tmp_path):
    """A stored run of three candidates with their ranking."""
    table = token_table(("a", "b", "c"), documents=12)
    whole = summary(table, reference=source("demo"), ranking=ranking(table, "kl"))
    return write_run(tmp_path / "ranked", manifest={"seed": 0}, table=table, summary=whole).folder


def test_a_ranking_is_read(ranked):
    assert [place.candidate for place in read_run(ranked).summary.ranking.places]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r.update(metric="kudos"), "which are not its candidates and metrics"),
        (lambda r: r["places"].pop(), "which are not its candidates and metrics"),
        (lambda r: r["places"].reverse(), "by other pairs than those there are"),
        (lambda r: r["pairs"].pop(), "by other pairs than those there are"),
        (lambda r: r["places"][0].update(best=1, worst=1, tied=[]), "which its pairs do not"),
        (lambda r: r["pairs"][0]["difference"].update(low=1.0), "which cannot be one of it"),
        (lambda r: r.update(metric="topk_overlap"), "whose topk_overlap is better"),
    ],
)
def test_a_ranking_that_its_figures_do_not_give_is_refused(ranked, change, said):
    restate(ranked, lambda found: change(found["ranking"]))
    with pytest.raises(InputError, match=said):
        read_run(ranked)
