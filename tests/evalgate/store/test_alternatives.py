"""The likeliest ids of both sides in a run folder: they come back as they were; lists that cannot be are refused."""

from __future__ import annotations

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evalgate.errors import InputError, ScoreError
from evalgate.store import alternatives
from evalgate.store.runs import read_run, write_run
from tests.evalgate.sample_run import ALTERNATIVES, listed, reseal

IDS, LOGPROBS = ([row[n] for row in ALTERNATIVES] for n in (0, 1))
ROWS = (2, 5, 130)


@pytest.fixture
def stored(tmp_path, table, document):
    found = listed(table, ROWS)
    return write_run(tmp_path / "run", manifest={}, table=table, summary=document, alternatives_table=found)


def test_alternatives_come_back_with_the_run(stored, table):
    back = read_run(stored.folder)
    assert back.alternatives_table.equals(listed(table, ROWS)) and stored.alternatives_table.equals(listed(table, ROWS))
    assert stored.manifest["files"]["alternatives.parquet"]["rows"] == 3
    frame = back.alternatives
    assert list(frame["cand_top_ids"].map(list)) == IDS
    assert list(frame["ref_top_logprobs"].map(list)) == LOGPROBS
    joined = back.tokens.merge(frame, on=["candidate", "window", "position"])
    assert len(joined) == 3 and joined["kl"].notna().all()


def test_a_run_without_them_is_read(tmp_path, table, document):
    write_run(tmp_path / "run", manifest={}, table=table, summary=document)
    back = read_run(tmp_path / "run")
    assert back.alternatives_table is None and back.alternatives is None
    assert not (tmp_path / "run" / "alternatives.parquet").exists()


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_damage_is_refused_by_name(stored, damage):
    path = stored.folder / "alternatives.parquet"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    else:
        path.unlink()
    with pytest.raises(InputError, match=r"alternatives\.parquet"):
        read_run(stored.folder)


def changed(found, name, row, value):
    values = found.column(name).to_pylist()
    values[row] = value
    return found.set_column(found.column_names.index(name), name, pa.array(values, found.schema.field(name).type))


BAD = {
    "a position that the table has not": (lambda f: changed(f, "position", 1, 99), "row 1"),
    "an unknown candidate": (lambda f: changed(f, "candidate", 2, "another"), "row 2"),
    "rows out of order": (lambda f: f.take([1, 0, 2]), "row 1 twice or out of"),
    "a row twice": (lambda f: f.take([0, 0, 1]), "row 1 twice or out of"),
    "a null": (lambda f: changed(f, "ref_top_ids", 1, None), "null in column 'ref_top_ids'"),
    "a null inside": (lambda f: changed(f, "ref_top_ids", 0, [7, None, 1]), "null inside a list"),
    "lists of two lengths": (lambda f: changed(f, "cand_top_ids", 0, [7, 3]), "different lengths for 'cand' at row 0"),
    "a negative id": (lambda f: changed(f, "cand_top_ids", 0, [7, -3, 900]), "cannot be at row 0"),
    "an id twice": (lambda f: changed(f, "cand_top_ids", 0, [7, 900, 900]), "twice at row 0"),
    "no log-probability": (lambda f: changed(f, "ref_top_logprobs", 0, [0.5, -1.0, -2.0]), "cannot be at row 0"),
    "a mask": (lambda f: changed(f, "ref_top_logprobs", 2, [*LOGPROBS[2][:9], -1e4]), "cannot be at row 2"),
    "not a number": (lambda f: changed(f, "ref_top_logprobs", 0, [-1.0, float("nan"), -2.0]), "cannot be at row 0"),
    "out of order": (lambda f: changed(f, "ref_top_logprobs", 2, [-2.0, -1.0, *LOGPROBS[2][2:]]), "order at row 2"),
    "another type": (lambda f: f.set_column(1, "window", f.column("window").cast(pa.int64())), "the columns candidate"),
    "another column": (lambda f: f.append_column("x", f.column("window")), "the columns candidate"),
    "a column too few": (lambda f: f.drop_columns(["cand_top_ids"]), "the columns candidate"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_is_refused(stored, table, document, tmp_path, what):
    """Read from a folder whose digests are right, and before it is written."""
    change, says = BAD[what]
    bad = change(listed(table, ROWS))
    folder = tmp_path / "bad"
    shutil.copytree(stored.folder, folder)
    pq.write_table(bad, folder / "alternatives.parquet")
    reseal(folder)
    with pytest.raises(InputError, match=rf"alternatives\.parquet .*{says}"):
        read_run(folder)
    with pytest.raises(ScoreError, match=says):
        write_run(tmp_path / "new", manifest={}, table=table, summary=document, alternatives_table=bad)
    assert not (tmp_path / "new").exists()


def test_more_than_ten_ids_are_refused(table):
    eleven = listed(table, (2,), [(list(range(11)), [-float(n) for n in range(11)])])
    with pytest.raises(ScoreError, match="more than 10 ids for 'ref' at row 0"):
        alternatives.check(eleven, table)


def test_a_row_count_that_differs_is_refused(stored):
    reseal(stored.folder, lambda m: m["files"]["alternatives.parquet"].update(rows=4))
    with pytest.raises(InputError, match=r"alternatives\.parquet has 3 rows where the manifest says 4"):
        read_run(stored.folder)


def test_no_rows_are_no_fault(table):
    alternatives.check(listed(table, ROWS).slice(0, 0), table)
    alternatives.check(listed(table, ROWS).slice(0, 0), table.slice(0, 0))
    with pytest.raises(ScoreError, match="row 0"):
        alternatives.check(listed(table, ROWS), table.slice(0, 0))
