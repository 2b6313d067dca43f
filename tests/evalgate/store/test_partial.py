"""Kept answers: taken over only where they are whole and where nothing that changes a number has changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from evalgate.core import SourceInfo, Window, WindowPolicy
from evalgate.corpora import Corpus
from evalgate.errors import InputError
from evalgate.measure.inputs import Inputs, identity_of
from evalgate.measure.run import RunRequest
from evalgate.store.partial import PartialRun, identity_hash, partial_root, partial_run

TABLE = pa.table({"kl": pa.array([0.1, 0.2, 0.3], pa.float32()), "window": pa.array([0, 0, 1], pa.int32())})


def test_a_shard_comes_back(tmp_path: Path) -> None:
    partial = PartialRun(tmp_path / "run")
    partial.keep(0, 2, TABLE)
    ((stop, table),) = partial.shards().values()
    assert stop == 2 and table.equals(TABLE)
    partial.discard()
    assert partial.shards() == {}


def test_a_shard_with_any_bit_turned_is_not_believed(tmp_path: Path) -> None:
    partial = PartialRun(tmp_path / "run")
    partial.keep(0, 2, TABLE)
    (path,) = partial.folder.iterdir()
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        assert partial.shards() == {}, place
        assert not path.exists()
    for other in ("00000000-00000002.parquet", "x.parquet"):
        (partial.folder / other).write_bytes(whole)
        assert partial.shards() == {}


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(InputError, match="set EVALGATE_CACHE"):
        partial_root()
    (tmp_path / "run").write_text("")
    with pytest.raises(InputError, match="set EVALGATE_CACHE"):
        PartialRun(tmp_path / "run").keep(0, 2, TABLE)


def test_a_second_run_of_one_identity_works_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path))
    with partial_run({"a": 1}, resume=True) as first:
        first.keep(0, 2, TABLE)
        with partial_run({"a": 1}, resume=True) as second:
            assert second.folder != first.folder and second.shards() == {}
        assert first.shards()


def test_a_finished_run_leaves_nothing_but_its_lock_in_the_folder_of_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path))
    with partial_run({"a": 1}, resume=True) as partial:
        partial.keep(0, 2, TABLE)
        partial.discard()
    left = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.parent for path in left] == [Path("locks")]
    (tmp_path / "locks").rename(tmp_path / "moved")
    (tmp_path / "locks").write_text("")
    with pytest.raises(InputError, match=r"locks.*set EVALGATE_CACHE"), partial_run({"a": 1}, resume=True):
        pass


def test_other_tokens_of_the_same_text_are_another_run() -> None:
    window = Window(0, "d", "prose", (0, 5, 6), 1, 3, (0, 2, 2))
    others = (replace(window, ids=(5, 6, 7)), replace(window, mask=(True, False)), replace(window, score_from=2))
    assert len({_hash(window), *map(_hash, others)}) == 4


def test_a_noise_floor_measured_anew_is_the_same_run() -> None:
    window = Window(0, "d", "prose", (0, 5, 6), 1, 3, (0, 2, 2))
    assert _hash(window, noise_floor=1e-6) == _hash(window, noise_floor=2e-6)


def _hash(window: Window, *, noise_floor: float = 1e-6) -> str:
    request = RunRequest.of(kind="ppl", reference=None, candidates=("demo",))
    info = SourceInfo(
        spec="demo", name="demo", kind="embedded", vocab_size=9, context_length=8, noise_floor=noise_floor
    )
    policy = WindowPolicy("disjoint", 8, 8)
    inputs = Inputs({"demo": info}, Corpus("c", (), (), "hash"), (window,), (), policy, None, {"evalgate": "0"})
    return identity_hash(identity_of(request, inputs))
