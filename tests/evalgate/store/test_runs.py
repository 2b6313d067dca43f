import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from evalgate.errors import InputError, ScoreError, UsageError
from evalgate.store import runs
from evalgate.store.documents import dump
from evalgate.store.runs import check_target, read_run, write_run
from tests.evalgate.sample_run import reseal


@pytest.fixture
def stored(tmp_path, table, document):
    return write_run(tmp_path / "run", manifest={"seed": 0, "specs": ("a", "b")}, table=table, summary=document)


def test_a_run_comes_back_bit_for_bit(stored, table, document):
    back = read_run(stored.folder)
    assert back.table.to_pydict() == table.to_pydict() and back.table.schema.equals(table.schema)
    assert back.summary == document
    assert back.manifest == stored.manifest
    assert back.folder == stored.folder
    assert sorted(p.name for p in stored.folder.iterdir()) == ["manifest.json", "summary.json", "tokens.parquet"]
    assert [p.name for p in stored.folder.parent.iterdir()] == ["run"]


def test_tokens_is_one_row_per_candidate_and_position(stored, table):
    frame = read_run(stored.folder).tokens
    assert list(frame.columns) == table.column_names
    assert np.array_equal(frame["kl"].to_numpy(), table["kl"].to_numpy())
    assert set(frame["candidate"]) == {"demo@int8", "demo@bf16"}


def test_the_table_is_stored_as_promised(stored):
    group = pq.ParquetFile(stored.folder / "tokens.parquet").metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert {c.compression for c in columns.values()} == {"ZSTD"}
    assert "BYTE_STREAM_SPLIT" in columns["kl"].encodings
    assert "RLE_DICTIONARY" in columns["document"].encodings
    assert stored.manifest["files"]["tokens.parquet"]["rows"] == 240


@pytest.mark.parametrize("name", ["tokens.parquet", "summary.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "altered", "missing"])
def test_damage_is_refused_by_name(stored, name, damage):
    path = stored.folder / name
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif name == "manifest.json":
        path.write_bytes(data.replace(b'"seed": 0', b'"seed": 1'))
    else:
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    with pytest.raises(InputError, match=name):
        read_run(stored.folder)


def test_unknown_versions_are_named(stored):
    reseal(stored.folder, lambda m: m.update(schema_version=7))
    with pytest.raises(InputError, match=r"manifest\.json has schema version 7 and this evalgate reads version 1"):
        read_run(stored.folder)
    reseal(stored.folder, lambda m: m.update(schema_version=1))
    document = json.loads((stored.folder / "summary.json").read_text())
    (stored.folder / "summary.json").write_text(json.dumps({**document, "schema_version": 9}))
    reseal(stored.folder, lambda m: None)
    with pytest.raises(InputError, match=r"summary\.json has schema version 9"):
        read_run(stored.folder)


def test_a_row_count_that_differs_is_refused(stored):
    reseal(stored.folder, lambda m: m["files"]["tokens.parquet"].update(rows=239))
    with pytest.raises(InputError, match=r"240 rows where the manifest says 239"):
        read_run(stored.folder)


def test_a_summary_of_another_shape_is_refused(stored):
    document = json.loads((stored.folder / "summary.json").read_text())
    (stored.folder / "summary.json").write_text(json.dumps({**document, "seed": "many"}))
    reseal(stored.folder, lambda m: None)
    with pytest.raises(InputError, match="not a summary \\(seed"):
        read_run(stored.folder)


def test_no_run_folder(tmp_path):
    with pytest.raises(InputError, match=r"there is no run folder .*nowhere"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "manifest.json").write_text('{"name": "a web app"}')
    with pytest.raises(InputError, match="not the manifest of a run folder"):
        read_run(tmp_path)


def test_what_is_not_ours_is_left_alone(tmp_path, table, document):
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "chapter.tex").write_text("years")
    for folder in (thesis, thesis / "chapter.tex"):
        with pytest.raises(UsageError):
            write_run(folder, manifest={}, table=table, summary=document, overwrite=True)
    assert (thesis / "chapter.tex").read_text() == "years"


def test_ours_is_replaced_only_when_asked(stored, table, document):
    with pytest.raises(UsageError, match="--overwrite"):
        write_run(stored.folder, manifest={"seed": 1}, table=table, summary=document)
    assert read_run(stored.folder).manifest["seed"] == 0
    (stored.folder / "report.html").write_text("old")
    write_run(stored.folder, manifest={"seed": 1}, table=table, summary=document, overwrite=True)
    assert read_run(stored.folder).manifest["seed"] == 1
    assert not (stored.folder / "report.html").exists()
    assert [p.name for p in stored.folder.parent.iterdir()] == ["run"]


def test_an_empty_folder_is_free(tmp_path, table, document):
    check_target(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    check_target(tmp_path / "empty")
    write_run(tmp_path / "empty", manifest={}, table=table, summary=document)
    assert read_run(tmp_path / "empty").table.num_rows == 240


def test_a_failed_replacement_keeps_the_old_run(stored, table, document, monkeypatch):
    rename = runs.Path.rename

    def fail_into_place(self, target):
        if target == stored.folder:
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(runs.Path, "rename", fail_into_place)
    with pytest.raises(InputError, match="No space left"):
        write_run(stored.folder, manifest={"seed": 1}, table=table, summary=document, overwrite=True)
    monkeypatch.undo()
    assert read_run(stored.folder).manifest["seed"] == 0
    assert [p.name for p in stored.folder.parent.iterdir()] == ["run"]


def test_a_manifest_may_not_forge_what_write_run_sets(tmp_path, table, document):
    with pytest.raises(UsageError, match="files"):
        write_run(tmp_path / "run", manifest={"files": {}}, table=table, summary=document)
    with pytest.raises(UsageError, match="token"):
        write_run(tmp_path / "run", manifest={}, table=table.drop_columns(["token"]), summary=document)
    assert not (tmp_path / "run").exists()


def test_no_document_carries_nan(tmp_path, table, document):
    with pytest.raises(ScoreError, match=r"manifest\.floor\[1\] is nan"):
        write_run(tmp_path / "run", manifest={"floor": [0.0, float("nan")]}, table=table, summary=document)
    figure = document.comparisons[0].overall.metrics["kl"].statistics["mean"].model_copy(update={"value": float("inf")})
    bad = document.model_copy(deep=True)
    bad.comparisons[0].overall.metrics["kl"].statistics["mean"] = figure
    with pytest.raises(ScoreError, match=r"summary\.comparisons\[0\]\.overall\.metrics\.kl\.statistics\.mean\.value"):
        write_run(tmp_path / "run", manifest={}, table=table, summary=bad)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ScoreError):
        dump({"a": float("-inf")}, name="x")


def test_a_folder_that_cannot_be_made_is_refused_before_measuring(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "run", tmp_path / "file" / "deeper" / "run", tmp_path / ("a" * 300)):
        with pytest.raises(UsageError, match="choose another --out"):
            check_target(folder)
    check_target(tmp_path / "new" / "deeper" / "run")


def test_a_link_to_an_empty_folder_is_filled_and_stays_a_link(tmp_path, table, document):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    check_target(tmp_path / "link")
    write_run(tmp_path / "link", manifest={"seed": 0}, table=table, summary=document)
    assert (tmp_path / "link").is_symlink()
    assert read_run(tmp_path / "disk").summary == document
