"""Traces of hidden states: recorded, measured against to the last bit, and every kind of damage named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evalgate.cli.trace import _show
from evalgate.core import Window
from evalgate.errors import InputError, MismatchError, ScoreError, UsageError
from evalgate.measure.record import RecordRequest, record
from evalgate.measure.run import RunRequest, run, silent
from evalgate.store.runs import Run
from evalgate.traces import PositionBatch, TraceWriter, cut, merge, read_trace, verify
from evalgate.traces.batch import row_digests, widened
from evalgate.traces.head import read_output_head
from evalgate.traces.layout import PARTIAL
from tests.checkpoints import texts
from tests.evalgate.measure.test_trace import Stops

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("hidden")
        patch.setenv("EVALGATE_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def data(place: Path) -> str:
    return texts(place / "texts")


def recorded(out: Path, model: str, data: str, **changes: Any) -> Path:
    ours = {name: changes.pop(name) for name in ("full", "top_k", "format") if name in changes}
    text = RunRequest.of("ppl", None, (model,), data=data, **{"context": 32, **changes})
    record(RecordRequest(text, out, hidden=True, **ours), observer=silent())
    return out


@pytest.fixture(scope="module", params=["", "@bf16"], ids=["float32", "bfloat16"])
def made(request: Any, place: Path, tiny: tuple[str, str], data: str, warm: object) -> tuple[str, Path, Run]:
    """The reference's spec, its trace, and a run of two candidates against the live model."""
    spec = f"{tiny[0]}{request.param}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evalgate.server.batches.BATCH_TOKENS", 150)  # several shards
        trace = recorded(place / f"ref{request.param}.trace", spec, data)
        live = run(RunRequest.of("kl", spec, (tiny[1], spec), data=data, context=32))
    return spec, trace, live


def test_every_column_is_that_of_the_live_reference(
    made: tuple[str, Path, Run], tiny: tuple[str, str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, alternatives included; from a folder that was moved away, with the model's folder not named."""
    spec, trace, live = made
    moved = Path(shutil.copytree(trace, place / f"moved{trace.stem}" / "other.trace"))
    monkeypatch.setattr("evalgate.server.batches.BATCH_TOKENS", 150)
    found = run(RunRequest.of("kl", str(moved), (tiny[1], spec)))
    assert found.table.equals(live.table)
    assert found.alternatives_table is not None and found.alternatives_table.equals(live.alternatives_table)
    assert any("to the last bit" in note for note in found.summary.notes)
    exact = {metric.exactness for c in found.summary.comparisons for metric in c.overall.metrics.values()}
    assert exact == {"exact"}
    assert found.summary.reference is not None and found.summary.reference.compute_dtype == (
        "bfloat16" if spec.endswith("bf16") else "float32"
    )


def test_other_batches_are_named_by_how_far_they_are_off(made: tuple[str, Path, Run], tiny: tuple[str, str]) -> None:
    """A sample of positions, in other tiles of rows: still exact, and the distance is said."""
    found = run(RunRequest.of("kl", str(made[1]), (tiny[1],), positions=40))
    assert found.table.num_rows == 40
    assert any("replayed here" in note for note in found.summary.notes)
    with pytest.raises(UsageError, match="loaded here"):
        run(RunRequest.of("kl", str(made[1]), ("http://127.0.0.1:9/v1#m",)))


def shown(trace: Path, *, json: bool) -> str:
    """What `evalgate trace info` prints."""
    lines: list[str] = []
    _show(SimpleNamespace(write=lines.append), trace, read_trace(trace).manifest, json=json)
    return "".join(lines)


def test_what_is_kept(made: tuple[str, Path, Run]) -> None:
    """Rows in the body's dtype, within their budget of bytes; the head is one file with its links."""
    spec, trace, _ = made
    assert verify(trace) == []
    meta = read_trace(trace).meta
    assert meta.hidden is not None and meta.hidden.dtype == ("bfloat16" if spec.endswith("bf16") else "float32")
    info = json.loads(shown(trace, json=True))
    positions = info["positions"]
    # the windows' file and Parquet's own frame weigh something in a trace of a few hundred positions
    frame = 16_000 * (info["shards"] + 1)
    width = 2 if spec.endswith("bf16") else 4
    assert info["bytes_per_position"] <= width * meta.hidden.size + 64 + frame / positions
    assert (trace / meta.hidden.file).stat().st_size == info["head_bytes"]
    assert (trace / meta.hidden.file).stat().st_nlink > 1
    text = shown(trace, json=False)
    assert f"hidden states of 32 x {meta.hidden.dtype}, taken after the final norm" in text and "a position" in text


def rewritten(
    trace: Path, out: Path, change: Callable[[PositionBatch], PositionBatch], head: Path | None = None
) -> Path:
    """A trace as a broken recorder would have sealed it: every checksum is right."""
    found = read_trace(trace)
    meta = found.meta
    if head is not None:
        from evalgate.store.manifest import file_digest

        assert meta.hidden is not None
        meta = replace(meta, hidden=replace(meta.hidden, head=file_digest(head)))
    writer = TraceWriter(out, meta, windows=found.windows, head=head or found.head)
    for batch in found.shards():
        writer.append(change(batch))
    writer.finish()
    return out


def with_rows(batch: PositionBatch, rows: np.ndarray, *, digests: bool) -> PositionBatch:
    hidden = rows.astype(batch.hidden.dtype)
    return replace(batch, hidden=hidden, digest=row_digests(hidden) if digests else batch.digest)


def problems(trace: Path) -> str:
    return "\n".join(problem.what for problem in verify(trace))


@pytest.mark.parametrize("digests", [True, False], ids=["resealed", "digests kept"])
def test_damage_is_named(
    tiny: tuple[str, str], place: Path, data: str, tmp_path: Path, warm: object, digests: bool
) -> None:
    """Rows shifted by one either way, a norm twice or never, noise: each has its own sentence."""
    trace = place / "plain.trace"
    if not trace.exists():
        recorded(trace, tiny[0], data)
    found = read_trace(trace)
    head = read_output_head(found.head, vocab_size=found.meta.source.vocab_size, size=found.meta.hidden.size)
    assert head.norm is not None and head.norm.kind == "rms"
    norm = head.norm
    # a norm without a gain is the same twice as once; this one has one
    assert np.ptp(norm.gain) > 0 or np.allclose(norm.apply(norm.apply(np.ones((1, 32)))), norm.apply(np.ones((1, 32))))

    def shifted(by: int) -> Callable[[PositionBatch], PositionBatch]:
        return lambda b: with_rows(b, np.roll(b.hidden, by, axis=0), digests=digests)

    def unnormed(b: PositionBatch) -> PositionBatch:
        scale = np.random.default_rng(3).uniform(2, 9, (len(b), 1))
        return with_rows(b, (widened(b.hidden) - norm.bias) / norm.gain * scale, digests=digests)

    def noise(b: PositionBatch) -> PositionBatch:
        return with_rows(b, np.random.default_rng(4).normal(0, 1, b.hidden.shape), digests=False)

    for name, change, words in (
        ("back", shifted(1), "shifted by one: each is that of the position before its own"),
        ("on", shifted(-1), "shifted by one: each is that of the position after its own"),
        ("never", unnormed, "to which the final norm was not applied"),
        ("noise", noise, "rows that are not those that were recorded"),
    ):
        broken = rewritten(trace, tmp_path / f"{name}.trace", change)
        assert words in problems(broken), name
    with pytest.raises(ScoreError, match="trace verify"):
        run(RunRequest.of("kl", str(tmp_path / "noise.trace"), (tiny[1],)))


def test_another_head_and_flipped_bytes(
    tiny: tuple[str, str], place: Path, data: str, tmp_path: Path, warm: object
) -> None:
    trace = place / "plain.trace"
    if not trace.exists():
        recorded(trace, tiny[0], data)
    other = recorded(tmp_path / "other.trace", tiny[1], data, limit=1)
    swapped = rewritten(trace, tmp_path / "swapped.trace", lambda batch: batch, head=read_trace(other).head)
    assert "the trace has another model's head" in problems(swapped)
    for name in (read_trace(trace).manifest.head, "shard-00000.parquet"):
        copy = Path(shutil.copytree(trace, tmp_path / f"flipped-{name}.trace"))
        content = bytearray((copy / name).read_bytes())
        content[len(content) // 2] ^= 1
        (copy / name).write_bytes(content)
        assert "was altered: its SHA-256 is" in problems(copy)
        with pytest.raises(InputError, match="was altered"):
            run(RunRequest.of("kl", str(copy), (tiny[1],)))


def test_a_recording_that_does_not_repeat_is_not_finished(
    tiny: tuple[str, str], data: str, tmp_path: Path, place: Path, warm: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that reach the disk with one bit changed; the interrupted recording goes on, and is then the same."""
    from evalgate.measure.kinds.recording import HiddenRecording

    monkeypatch.setattr("evalgate.server.batches.BATCH_TOKENS", 150)
    out = tmp_path / "ref.trace"
    kept = HiddenRecording._batch

    def flipped(self: HiddenRecording, part: list[Window], meta: Any) -> PositionBatch:
        batch = kept(self, part, meta)
        bits = batch.hidden.copy().view(np.uint32)
        bits[0, 0] ^= 1 << 12
        return replace(batch, hidden=bits.view(np.float32))

    with monkeypatch.context() as patch:
        patch.setattr(HiddenRecording, "_batch", flipped)
        with pytest.raises(ScoreError, match="give other logits than the model"):
            recorded(out, tiny[0], data)
    assert (out / PARTIAL).is_file()
    shutil.rmtree(out)
    text = RunRequest.of("ppl", None, (tiny[0],), data=data, context=32)
    with pytest.raises(KeyboardInterrupt):
        record(RecordRequest(text, out, hidden=True), observer=Stops(after=1))
    with pytest.raises(MismatchError, match="another reference, corpus or setting"):
        recorded(out, tiny[1], data)
    recorded(out, tiny[0], data)
    whole, again = read_trace(recorded(tmp_path / "whole.trace", tiny[0], data)).rows(), read_trace(out).rows()
    assert whole.hidden.tobytes() == again.hidden.tobytes() and whole.logprob.tobytes() == again.logprob.tobytes()


def test_cut_merge_and_refusals(tiny: tuple[str, str], place: Path, data: str, tmp_path: Path, warm: object) -> None:
    trace = place / "plain.trace"
    if not trace.exists():
        recorded(trace, tiny[0], data)
    names = sorted({window.document for window in read_trace(trace).windows})
    parts = [tmp_path / "one.trace", tmp_path / "two.trace"]
    cut(trace, parts[0], documents=names[:1])
    cut(trace, parts[1], documents=names[1:])
    both = tmp_path / "both.trace"
    merge(parts, both)
    assert verify(both) == [] and len(read_trace(both)) == len(read_trace(trace))
    for change, words in (
        ({"full": True}, "--full"),
        ({"top_k": 9}, "--top-k"),
        ({"logits": "model"}, "--logits model"),
    ):
        with pytest.raises(UsageError, match=words):
            recorded(tmp_path / "no.trace", tiny[0], data, **change)
    with pytest.raises(UsageError, match="--hidden"):
        recorded(tmp_path / "no.kld", tiny[0], data, format="llama.cpp", windows="llama.cpp")
    without = tmp_path / "without.trace"
    shutil.copytree(trace, without)
    (without / read_trace(trace).manifest.head).unlink()
    with pytest.raises(InputError, match="is missing"):
        run(RunRequest.of("kl", str(without), (tiny[1],)))
