"""Recording a reference and measuring against it, as a user types it, on tiny checkpoints with a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import evalgate
from evalgate.core import Window
from evalgate.errors import MismatchError, UsageError
from evalgate.measure.record import RecordRequest, record
from evalgate.measure.recordings.base import split_positions
from evalgate.measure.run import RunRequest, run, silent
from evalgate.server.client import EmbeddedClient
from evalgate.specs import parse
from evalgate.traces import concatenate, llamacpp_kl, read_logits_file, read_trace, verify
from evalgate.traces.layout import PARTIAL
from tests.checkpoints import texts
from tests.serve.architectures import built, own_logits, perturbed
from tests.serve.tiny_models import metaspace, save
from tests.stuck import STUCK

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture(scope="module")
def models(tiny: tuple[str, str], warm: object) -> tuple[str, str]:
    return tiny


@pytest.fixture(scope="module")
def data(place: Path) -> str:
    return texts(place / "texts")


@pytest.fixture(scope="module")
def own_cache(place: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVALGATE_CACHE", str(place / "cache"))
        yield


def recorded(out: Path, model: str, data: str, **changes: Any) -> Path:
    ours = {n: changes.pop(n) for n in ("top_k", "tail_samples", "full", "format") if n in changes}
    text = RunRequest.of("ppl", None, (model,), data=data, **{"context": 32, **changes})
    record(RecordRequest(text, out, **ours), observer=silent())
    return out


@pytest.fixture(scope="module")
def trace(place: Path, models: tuple[str, str], data: str, own_cache: None) -> Path:
    return recorded(place / "ref.trace", models[0], data, top_k=24, tail_samples=8)


@pytest.fixture(scope="module")
def direct(place: Path, models: tuple[str, str], data: str, own_cache: None) -> evalgate.store.runs.Run:
    return run(RunRequest.of("kl", models[0], (models[1],), data=data, context=32))


@pytest.fixture(scope="module")
def against(place: Path, models: tuple[str, str], trace: Path, own_cache: None) -> evalgate.store.runs.Run:
    """Against the trace, where the reference's folder is not named at all."""
    return run(RunRequest.of("kl", str(trace), models, out=place / "run"))


def of(measured: evalgate.store.runs.Run, model: str) -> pd.DataFrame:
    frame = measured.tokens
    return frame[frame["candidate"] == model].reset_index(drop=True)


def test_the_trace_brings_windows_and_exact_figures(
    models: tuple[str, str], direct: evalgate.store.runs.Run, against: evalgate.store.runs.Run
) -> None:
    ours, theirs = of(against, models[1]), of(direct, models[1])
    for column in ("window", "position", "token", "bytes", "ref_rank", "cand_rank", "ref_top1", "cand_top1"):
        assert (ours[column] == theirs[column]).all(), column
    assert (ours["document"].astype(str) == theirs["document"].astype(str)).all()
    for column in ("ref_nll", "cand_nll", "ref_entropy", "cand_entropy", "ref_margin", "cand_margin"):
        np.testing.assert_allclose(ours[column], theirs[column], atol=2e-6, err_msg=column)
    np.testing.assert_allclose(ours["topk_overlap"], theirs["topk_overlap"], atol=1e-6)
    assert against.summary.reference is not None and against.summary.reference.kind == "trace"
    assert against.summary.corpus.hash == direct.summary.corpus.hash


def test_estimates_are_near_the_exact_values_and_bounds_hold(
    models: tuple[str, str], direct: evalgate.store.runs.Run, against: evalgate.store.runs.Run
) -> None:
    ours, theirs = of(against, models[1]), of(direct, models[1])
    assert (ours["kl_low"] <= theirs["kl"] + 1e-5).all()
    assert (ours["tv_low"] <= theirs["tv"] + 1e-5).all() and (theirs["tv"] <= ours["tv_high"] + 1e-5).all()
    assert (ours["js_low"] <= theirs["js"] + 1e-5).all() and (theirs["js"] <= ours["js_high"] + 1e-5).all()
    error = np.sqrt((ours["kl_se"].astype(float) ** 2).sum()) / len(ours)
    assert abs(ours["kl"].mean() - theirs["kl"].mean()) < 4 * error
    comparison = next(c for c in against.summary.comparisons if c.candidate.spec == models[1])
    kl = comparison.overall.metrics["kl"]
    assert kl.exactness == "estimated"
    assert kl.statistics["sampling_se"].value == pytest.approx(error, rel=1e-5)
    assert (
        kl.statistics["mean_low"].value <= direct.summary.comparisons[0].overall.metrics["kl"].statistics["mean"].value
    )
    same = next(c for c in against.summary.comparisons if c.candidate.spec == models[0]).overall.metrics
    assert same["kl"].statistics["mean"].value < 1e-9
    assert same["top1_agreement"].statistics["mean"].value == 1
    regret = comparison.overall.metrics["regret"]
    known = direct.summary.comparisons[0].overall.metrics["regret"].statistics["mean"].value
    low = regret.statistics.get("mean") or regret.statistics["mean_low"]
    assert low.value <= known + 1e-6


def test_a_full_trace_gives_exact_figures(
    place: Path, models: tuple[str, str], data: str, direct: evalgate.store.runs.Run, own_cache: None
) -> None:
    full = recorded(place / "full.trace", models[0], data, top_k=24, tail_samples=8, full=True)
    measured = run(RunRequest.of("kl", str(full), (models[1],)))
    ours, theirs = of(measured, models[1]), of(direct, models[1])
    for column in ("kl", "reverse_kl", "js", "tv", "regret"):
        np.testing.assert_allclose(ours[column], theirs[column], atol=2e-4, err_msg=column)
    note = next(n for n in measured.summary.notes if "float16" in n)
    bound = float(note.rsplit(" ", 1)[1])
    assert np.abs(ours["kl"] - theirs["kl"]).max() <= bound + 1e-6
    assert {m.exactness for m in measured.summary.comparisons[0].overall.metrics.values()} == {"exact"}


def test_an_interrupted_measurement_goes_on_and_a_sample_is_measured(
    models: tuple[str, str], trace: Path, own_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalgate.server.batches.BATCH_TOKENS", 40)
    request = RunRequest.of("agree", str(trace), (models[1],), positions=60)
    with pytest.raises(KeyboardInterrupt):
        run(request, observer=Stops(after=2))
    asked: list[int] = []
    gather = EmbeddedClient.gather

    def counted(self: EmbeddedClient, model: str, windows: Any, wanted: Any, *, top_k: int) -> Any:
        asked.extend(w.index for w in windows)
        return gather(self, model, windows, wanted, top_k=top_k)

    monkeypatch.setattr(EmbeddedClient, "gather", counted)
    measured = run(request)
    windows = set(measured.tokens["window"])
    assert measured.table.num_rows == 60
    assert 0 < len(asked) < len(windows)
    assert measured.summary.comparisons[0].overall.metrics["top1_agreement"].exactness == "exact"


class Stops:
    """An observer that interrupts at a batch."""

    def __init__(self, *, after: int) -> None:
        self._left = after

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def advance(self, **_: Any) -> None:
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt


def test_an_interrupted_recording_goes_on_and_is_the_same(
    place: Path, models: tuple[str, str], data: str, trace: Path, own_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalgate.server.batches.BATCH_TOKENS", 40)

    out = place / "stopped.trace"
    text = RunRequest.of("ppl", None, (models[0],), data=data, context=32)
    with pytest.raises(KeyboardInterrupt):
        record(RecordRequest(text, out, top_k=24, tail_samples=8), observer=Stops(after=1))
    assert (out / PARTIAL).is_file()
    with pytest.raises(UsageError, match="left alone"):
        record(RecordRequest(replace(text, resume=False), out, top_k=24, tail_samples=8), observer=silent())
    with pytest.raises(MismatchError, match="another reference, corpus or setting"):
        record(RecordRequest(text, out, top_k=20, tail_samples=8), observer=silent())
    record(RecordRequest(text, out, top_k=24, tail_samples=8), observer=silent())
    assert verify(out) == [] and verify(trace) == []
    whole, again = (concatenate(list(read_trace(t).shards())) for t in (trace, out))
    assert len(read_trace(out).manifest.shards) > 2
    for name in ("window", "position", "top_ids", "tail_ids", "rank"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(again, name))
    np.testing.assert_allclose(whole.tail_logprobs, again.tail_logprobs, atol=1e-5)


def test_refusals_name_option_and_vocabulary(
    place: Path, models: tuple[str, str], data: str, trace: Path, own_cache: None
) -> None:
    for change, words in (
        ({"data": data}, "--data"),
        ({"windows": "sliding"}, "--windows"),
        ({"context": 16, "limit": 3}, "--context, --limit"),
        ({"candidates": (parse(str(trace)),)}, "which can only be the reference"),
    ):
        with pytest.raises(UsageError, match=words):
            run(replace(RunRequest.of("kl", str(trace), (models[1],)), **change))
    other = str(save(perturbed(built("gpt2")), place / "other", metaspace()))
    with pytest.raises(MismatchError, match="different vocabularies"):
        run(RunRequest.of("kl", str(trace), (other,)))
    with pytest.raises(UsageError, match=r"ends in \.trace"):
        recorded(place / "name", models[0], data)
    with pytest.raises(UsageError, match="left alone"):
        recorded(trace, models[0], data)
    with pytest.raises(UsageError, match=r"--windows llama\.cpp"):
        recorded(place / "f.kld", models[0], data, format="llama.cpp")


def test_a_logits_file_is_written_and_read_and_llamacpps_figure_comes_out(
    place: Path, models: tuple[str, str], data: str, own_cache: None
) -> None:
    options = {"windows": "llama.cpp", "context": 16}
    file = recorded(place / "ref.kld", models[0], data, format="llama.cpp", **options)
    direct = run(RunRequest.of("kl", models[0], (models[1],), data=data, **options))
    measured = run(RunRequest.of("kl", str(file), (models[1],)))
    ours, exact = of(measured, models[1]), of(direct, models[1])
    assert (ours["token"] == exact["token"]).all() and (ours["position"] == exact["position"]).all()
    assert ours["bytes"].sum() > 0
    assert (ours["kl_low"] <= exact["kl"] + 1e-5).all() and (exact["kl"] <= ours["kl_high"] + 1e-5).all()
    np.testing.assert_allclose(ours["cand_nll"], exact["cand_nll"], atol=2e-6)
    logits_file = read_logits_file(file)
    each = []
    for window in logits_file.windows(bos_id=0):
        rows = own_logits(perturbed(built("llama")), window.ids).numpy()[[p - 1 for p in window.positions]]
        each.append(llamacpp_kl(logits_file.rows(window.index), rows.astype(np.float32)))
    note = next(n for n in measured.summary.notes if "llama.cpp's own mean KLD" in n)
    mean = float(note.rsplit(": ", 1)[1].split(" ")[0])
    assert mean == pytest.approx(float(np.concatenate(each).mean()), abs=2e-5)
    assert mean == pytest.approx(exact["kl"].mean(), abs=1e-3)
    kl = measured.summary.comparisons[0].overall.metrics["kl"]
    assert kl.exactness == "bounded" and {"mean_low", "mean_high"} <= set(kl.statistics)


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "evalgate", *arguments], capture_output=True, text=True, timeout=STUCK, **options
    )


def test_the_commands(place: Path, models: tuple[str, str], data: str, own_cache: None) -> None:
    path = str(place / "typed.trace")
    done = command(
        "record", "--ref", models[0], "--data", data, "--context", "32", "--top-k", "24", "--out", path, "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["positions"] == len(read_trace(path))
    assert "windows" in done.stderr
    measured = command("kl", "--ref", path, "--cand", models[1], "--full", "--out", str(place / "typed"))
    assert measured.returncode == 0, measured.stderr
    for words in ("estimated", "Mean KLD, lower bound", "Mean KLD, sampling error", "tail samples a position"):
        assert words in " ".join(measured.stdout.split()), words
    info = json.loads(command("trace", "info", path, "--json").stdout)
    assert info["top_k"] == 24 and info["positions"] == len(read_trace(path))
    assert "likeliest ids" in command("trace", "info", path).stdout
    cut = str(place / "cut.trace")
    assert command("trace", "cut", path, "--positions", "9", "--out", cut).returncode == 0
    assert len(read_trace(cut)) == 9
    halves = [str(place / f"{name}.trace") for name in ("prose", "code")]
    documents = sorted({w.document for w in read_trace(path).windows})
    for half, mine in zip(halves, (documents[:2], documents[2:]), strict=True):
        names = [part for name in mine for part in ("--document", name)]
        assert command("trace", "cut", path, "--out", half, *names).returncode == 0
    both = str(place / "both.trace")
    assert command("trace", "merge", *halves, "--out", both).returncode == 0
    assert len(read_trace(both)) == len(read_trace(path))
    assert command("trace", "verify", both).stdout.strip().endswith("intact")
    shard = next(Path(both).glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    damaged = command("trace", "verify", both, "--json")
    assert damaged.returncode == 2
    assert json.loads(damaged.stdout)["problems"][0]["file"] == shard.name
    refused = command("kl", "--ref", both, "--cand", models[1], "--out", str(place / "no"))
    assert refused.returncode == 2 and shard.name in refused.stderr


def test_positions_of_a_window_are_split_without_a_loss() -> None:
    mask = (True, False, True, True, False, True, True)
    for window in (
        Window(3, "d", "", tuple(range(10)), 2, 9, (1,) * 10, mask),
        Window(3, "d", "", tuple(range(10)), 2, 9, (1,) * 10),
    ):
        for most in (1, 2, 3, 50):
            parts = split_positions(window, most)
            assert tuple(p for part in parts for p in part.positions) == window.positions
            assert all(len(part.positions) <= most and len(part.ids) == part.score_to for part in parts)
