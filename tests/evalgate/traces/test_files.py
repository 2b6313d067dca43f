from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from evalgate.cli.app import invoke
from evalgate.errors import InputError, MismatchError, ScoreError, UsageError
from evalgate.traces import PositionBatch, TraceWriter, condense, cut, merge, read_trace, verify
from evalgate.traces.layout import FORMAT, MANIFEST, PARTIAL
from evalgate.traces.tables import shard_bytes
from tests.evalgate.cli.test_cli import MemoryOutput
from tests.evalgate.trace_samples import meta, one_row_places, record, windows, zipf_logits

V = 50


def write(folder: Path, shown, *, batch: int = 2, **changes):
    kept = meta(V, **changes)
    writer = TraceWriter(folder, kept, windows=shown)
    for low in range(0, len(shown), batch):
        writer.append(record(shown[low : low + batch], vocabulary=V, full=kept.full))
    writer.finish()
    return read_trace(folder)


def assert_same(a: PositionBatch, b: PositionBatch) -> None:
    for field in fields(a):
        left, right = getattr(a, field.name), getattr(b, field.name)
        assert (left is None) == (right is None), field.name
        if left is not None:
            assert left.dtype == right.dtype, field.name
            np.testing.assert_array_equal(left, right, err_msg=field.name)


@pytest.mark.parametrize("full", [False, True])
def test_round_trip_is_bit_exact(tmp_path, full):
    shown = windows(5, 9, V)
    trace = write(tmp_path / "ref.trace", shown, full=full)
    assert trace.windows == tuple(shown)
    assert len(trace) == sum(len(w.positions) for w in shown)
    assert trace.meta == meta(V, full=full)
    assert len(list(trace.shards())) == 3
    for low, batch in zip((0, 2, 4), trace.shards(), strict=True):
        assert_same(batch, record(shown[low : low + 2], vocabulary=V, full=full))
    assert len(trace.rows()) == len(trace)
    assert verify(tmp_path / "ref.trace") == []


def test_shards_name_document_and_domain(tmp_path):
    shown = windows(2, 9, V)
    write(tmp_path / "t", shown)
    table = pq.read_table(tmp_path / "t" / "shard-00000.parquet")
    want = [w.document for w in shown for _ in w.positions]
    assert table.column("document").to_pylist() == want
    assert set(table.column("domain").to_pylist()) == {"prose"}


def test_whole_vocabulary_needs_no_samples(tmp_path):
    shown = windows(2, 9, V)
    writer = TraceWriter(tmp_path / "t", meta(V, k=V, m=0), windows=shown)
    rows = record(shown, vocabulary=V, k=V, m=0)
    writer.append(rows)
    writer.finish()
    assert_same(read_trace(tmp_path / "t").rows(), rows)


def test_every_flipped_byte_is_found(tmp_path):
    """The first and last 64 of each file, and a fourth of those between."""
    folder = tmp_path / "t"
    shown = windows(1, 3, V, documents=1)
    writer = TraceWriter(folder, meta(V, k=3, m=2), windows=shown)
    writer.append(record(shown, vocabulary=V, k=3, m=2))
    writer.finish()
    assert verify(folder) == []
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        with path.open("r+b", buffering=0) as file:
            for at, byte in enumerate(whole):
                if at % 4 and 64 <= at < len(whole) - 64:
                    continue
                file.seek(at)
                file.write(bytes([byte ^ 1 << (at // 4 % 8)]))
                problems = verify(folder)
                assert [p.file for p in problems] == [path.name], (path.name, at)
                file.seek(at)
                file.write(bytes([byte]))
    assert verify(folder) == []


@pytest.mark.parametrize("name", ["windows.parquet", "shard-00000.parquet", MANIFEST])
def test_a_cut_file_is_refused_by_name(tmp_path, name):
    write(tmp_path / "t", windows(2, 6, V))
    path = tmp_path / "t" / name
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(InputError, match=name):
        read_trace(tmp_path / "t").rows()
    assert name in {p.file for p in verify(tmp_path / "t")}


def test_an_altered_shard_is_refused_when_it_is_read(tmp_path):
    trace = write(tmp_path / "t", windows(4, 6, V))
    path = tmp_path / "t" / "shard-00001.parquet"
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)
    trace.shard(0)
    with pytest.raises(InputError, match=r"shard-00001.parquet was altered"):
        trace.shard(1)


def test_missing_and_unlisted_files(tmp_path):
    write(tmp_path / "t", windows(2, 6, V))
    (tmp_path / "t" / "extra").write_text("x")
    assert [p.file for p in verify(tmp_path / "t")] == ["extra"]
    (tmp_path / "t" / "shard-00000.parquet").unlink()
    with pytest.raises(InputError, match=r"shard-00000.parquet is missing"):
        read_trace(tmp_path / "t")
    output = MemoryOutput()
    assert invoke(["trace", "verify", str(tmp_path / "t")], output) == 2
    shard, extra = output.text.splitlines()
    assert shard.startswith(f"{tmp_path / 't' / 'shard-00000.parquet'} is missing: ") and extra.startswith(
        "extra: is not"
    )
    with pytest.raises(InputError, match=r"there is no trace .*nothing: name a folder"):
        read_trace(tmp_path / "nothing")
    (tmp_path / "t" / MANIFEST).unlink()
    with pytest.raises(InputError, match=r"has no manifest\.json and so is not a trace"):
        read_trace(tmp_path / "t")
    with pytest.raises(InputError, match="extra is a file and not a trace"):
        read_trace(tmp_path / "t" / "extra")


def test_a_respelled_or_future_manifest_is_refused(tmp_path):
    write(tmp_path / "t", windows(2, 6, V))
    path = tmp_path / "t" / MANIFEST
    whole = json.loads(path.read_bytes())
    for body, message in (
        (whole, "altered"),  # other spacing
        ({**whole, "schema_version": 1}, "schema version 1"),
        ({**whole, "format": "x"}, "not the manifest of a trace"),
        ({k: v for k, v in whole.items() if k != "meta"}, "altered"),
    ):
        path.write_text(json.dumps(body))
        with pytest.raises(InputError, match=message):
            read_trace(tmp_path / "t")
    path.write_bytes(FORMAT.sealed({"created": whole["created"], "parents": []}, {}))
    with pytest.raises(InputError, match="lacks a field"):
        read_trace(tmp_path / "t")


def test_resume_goes_on_where_it_stopped(tmp_path):
    shown, folder = windows(4, 6, V), tmp_path / "t"
    writer = TraceWriter(folder, meta(V), windows=shown)
    writer.append(record(shown[:2], vocabulary=V))
    with pytest.raises(ScoreError, match="window 2"):
        writer.finish()
    with pytest.raises(InputError, match="resume it"):
        read_trace(folder)
    with pytest.raises(UsageError, match="resume"):
        TraceWriter(folder, meta(V), windows=shown)
    (folder / "shard-00001.parquet").write_bytes(b"half")  # renamed, not yet listed
    (folder / ".evalgate.0123456789abcdef.tmp").write_bytes(b"half")
    again = TraceWriter.resume(folder, meta(V), windows=shown)
    assert again.done == {0, 1}
    assert [w.index for w in again.remaining] == [2, 3]
    with pytest.raises(ScoreError, match="already recorded"):
        again.append(record(shown[:2], vocabulary=V))
    again.append(record(shown[2:], vocabulary=V))
    again.finish()
    assert verify(folder) == []
    assert not (folder / PARTIAL).exists()
    assert_same(read_trace(folder).rows(), write(tmp_path / "u", shown).rows())


def test_resume_refuses_another_recording(tmp_path):
    shown, folder = windows(4, 6, V), tmp_path / "t"
    TraceWriter(folder, meta(V), windows=shown).append(record(shown[:2], vocabulary=V))
    for other in (meta(V, seed=1), meta(V, corpus_hash="d"), meta(V, k=9)):
        with pytest.raises(MismatchError, match="another reference"):
            TraceWriter.resume(folder, other, windows=shown)
    with pytest.raises(MismatchError, match="other windows"):
        TraceWriter.resume(folder, meta(V), windows=shown[:3])
    shard = folder / "shard-00000.parquet"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(InputError, match="shard-00000"):
        TraceWriter.resume(folder, meta(V), windows=shown)


def test_settings_that_cannot_work(tmp_path):
    shown = windows(1, 6, V)
    for wrong in (meta(V, k=1), meta(V, k=V + 1), meta(V, m=1), meta(V, k=V, m=4)):
        with pytest.raises(UsageError):
            TraceWriter(tmp_path / "t", wrong, windows=shown)
    for windows_ in ([], [shown[0], shown[0]], [replace(shown[0], mask=(False,) * 5)]):
        with pytest.raises(UsageError):
            TraceWriter(tmp_path / "t", meta(V), windows=windows_)


def broken_rows(rows: PositionBatch):
    def put(name, value, at=(2,)):
        values = getattr(rows, name).copy()
        values[at] = value
        return replace(rows, **{name: values})

    swapped = rows.top_logprobs.copy()
    swapped[2, :2] = swapped[2, 1::-1]
    yield put("logprob", np.nan)
    yield put("logprob", 0.5)
    yield put("token", V)
    yield put("rank", 0)
    yield put("rank", 1 if rows.rank[2] != 1 else 2)
    yield put("entropy", np.inf)
    yield put("entropy", 5.0)
    yield put("top_logprobs", np.nan, (2, 3))
    yield replace(rows, top_logprobs=swapped)
    yield put("top_ids", rows.top_ids[2, 0], (2, 1))
    yield put("top_ids", -1, (2, 7))
    yield put("tail_mass", -0.1)
    yield put("tail_mass", 0.99)
    yield put("tail_ids", rows.top_ids[2, 0], (2, 1))
    yield put("tail_ids", -1, (2, 1))
    yield put("tail_logprobs", 0.0, (2, 1))
    yield put("tail_logprobs", -np.inf, (2, 1))
    yield put("position", 0)
    yield put("bytes", 99)


def test_rows_that_cannot_be_are_refused_with_their_place(tmp_path):
    shown = windows(2, 6, V)
    rows = record(shown, vocabulary=V)
    cases = list(broken_rows(rows))
    writer = TraceWriter(tmp_path / "t", meta(V), windows=shown)
    for number, wrong in enumerate(cases):
        with pytest.raises(ScoreError) as caught:
            writer.append(wrong)
        assert caught.value.context["window"] == 0, number
        assert f"window {rows.window[2]}, position " in caught.value.message, number
    for wrong in (
        replace(rows, top_ids=rows.top_ids[:, :7]),
        replace(rows, logprob=rows.logprob.astype(np.float64)),
        record(shown, vocabulary=V, full=True),
    ):
        with pytest.raises(ScoreError):
            writer.append(wrong)
    with pytest.raises(ScoreError, match="window 0, position 3"):
        writer.append(rows.take(np.arange(len(rows)) != 2))
    writer.append(rows)
    writer.finish()


def test_merge_of_parts_of_one_corpus(tmp_path):
    shown = windows(6, 6, V)
    write(tmp_path / "b", shown[3:], batch=1)
    write(tmp_path / "a", shown[:3], batch=1)
    whole = write(tmp_path / "whole", shown, batch=1)
    manifest = merge([tmp_path / "b", tmp_path / "a"], tmp_path / "m")
    got = read_trace(tmp_path / "m")
    assert verify(tmp_path / "m") == []
    assert got.windows == whole.windows
    order = np.lexsort((got.rows().position, got.rows().window))
    assert_same(got.rows().take(order), whole.rows())
    assert manifest.parents == tuple(read_trace(tmp_path / n).manifest.checksum for n in "ba")
    with pytest.raises(MismatchError, match="window 0"):
        merge([tmp_path / "a", tmp_path / "whole"], tmp_path / "n")
    with pytest.raises(UsageError):
        merge([tmp_path / "a"], tmp_path / "n")


def test_merge_of_two_corpora(tmp_path):
    a, b = windows(2, 6, V), [replace(w, document="x" + w.document) for w in windows(3, 6, V)]
    write(tmp_path / "a", a)
    write(tmp_path / "b", b, corpus_hash="other", corpus="more")
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m")
    got = read_trace(tmp_path / "m")
    assert [w.index for w in got.windows] == [0, 1, 2, 3, 4]
    assert [w.document for w in got.windows] == [w.document for w in (*a, *b)]
    assert got.meta.corpus == "text + more"
    assert verify(tmp_path / "m") == []
    write(tmp_path / "c", a, corpus_hash="third")
    with pytest.raises(MismatchError, match="document"):
        merge([tmp_path / "a", tmp_path / "c"], tmp_path / "n")
    write(tmp_path / "d", b, corpus_hash="other", seed=3)
    with pytest.raises(MismatchError, match="another reference"):
        merge([tmp_path / "a", tmp_path / "d"], tmp_path / "n")


def test_cut_by_documents_and_by_positions(tmp_path):
    shown = windows(4, 8, V)
    whole = write(tmp_path / "t", shown).rows()
    cut(tmp_path / "t", tmp_path / "d", documents=["doc1"])
    got = read_trace(tmp_path / "d")
    assert {w.document for w in got.windows} == {"doc1"}
    assert_same(got.rows(), whole.take(whole.window >= 2))
    assert got.manifest.parents == (read_trace(tmp_path / "t").manifest.checksum,)
    for count in range(1, len(whole) + 1):
        cut(tmp_path / "t", tmp_path / f"p{count}", positions=count)
        assert_same(read_trace(tmp_path / f"p{count}").rows(), whole.take(np.arange(count)))
        assert verify(tmp_path / f"p{count}") == []
    for wrong in ({}, {"positions": 0}, {"positions": len(whole) + 1}, {"documents": ["no"]}, {"documents": []}):
        with pytest.raises(UsageError):
            cut(tmp_path / "t", tmp_path / "w", **wrong)


def test_size_a_position_on_realistic_rows():
    vocabulary, n, many = 262144, 48, 60
    places = one_row_places(n, vocabulary)
    rows = condense(zipf_logits(n, vocabulary, seed=3), places)
    rng = np.random.default_rng(0)

    def again(name: str) -> np.ndarray:
        values = np.concatenate([getattr(rows, name)] * many)
        if name.endswith("_ids"):
            return rng.integers(0, vocabulary, values.shape).astype(np.int32)
        noise = rng.normal(0, 1e-3, values.shape) if values.dtype == np.float32 else 0
        return (values + noise).astype(values.dtype)  # so that no row repeats another one's digits

    big = replace(rows, **{f.name: again(f.name) for f in fields(rows) if getattr(rows, f.name) is not None})
    size = len(shard_bytes(big, {w.index: w for w, _ in places})) / len(big)
    assert size < 600, size
