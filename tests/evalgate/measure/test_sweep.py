"""Sweeps over tiny checkpoints with a real server: what is ranked, left out, resumed and measured again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import evalgate
from evalgate.errors import InputError, ServerError, SourceError, UsageError
from evalgate.measure.kinds.lenient import ReferenceFailed
from evalgate.server.client import EmbeddedClient
from evalgate.server.process import EmbeddedServer
from evalgate.store.sweeps import PROGRESS, read_progress
from evalgate.sweeps import Sweep, load_sweep
from tests.checkpoints import texts
from tests.evalgate.cli.test_cli import call

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweep")


@pytest.fixture(scope="module")
def data(place: Path) -> str:
    """Four documents of the session's texts and eight more, in two domains."""
    folder = Path(texts(place / "texts"))
    for n in range(4):
        (folder / "prose" / f"more{n}.txt").write_text(f"Number {n}: the {n * 7} lazy foxes jump over it. " * 5)
        (folder / "code" / f"more{n}.txt").write_text(f"def f{n}(x):\n    return x + {n * 13}\n" * 5)
    return str(folder)


@pytest.fixture(autouse=True)
def own_cache(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALGATE_CACHE", str(place / "cache"))


@pytest.fixture(scope="module")
def specs(tiny: tuple[str, str], warm: object) -> list[str]:
    """Reference first; the last one cannot be loaded."""
    ref, cand = tiny
    return [ref, cand, f"{cand}@f32", f"{ref}@bf16", f"{Path(ref).parent}/nothing"]


@pytest.fixture(scope="module")
def swept(specs: list[str], data: str, place: Path) -> Iterator[Sweep]:
    """One sweep, measured once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVALGATE_CACHE", str(place / "cache"))
        yield evalgate.sweep(specs[0], specs[1:], data=data, context=32, out=place / "out", device="cpu")


def test_the_best_comes_first_and_what_cannot_load_last(swept: Sweep, specs: list[str]) -> None:
    board = swept.board
    assert board.entries[0].spec == specs[3] and board.entries[-1].spec == specs[4]
    assert [entry.measured for entry in board.entries] == [True, True, True, False]
    assert "does not exist" in board.entries[-1].reason
    first, tied = board.entries[0], board.entries[1:3]
    assert first.place is not None and first.place.text == "1" and first.size is not None and first.size.bits == 16
    assert {entry.place.text for entry in tied if entry.place} == {"2-3"}  # they are the same model
    assert all(entry.speed is not None and entry.speed > 0 for entry in board.measured)
    assert {entry.name for entry in board.entries} == {"ref@bf16", "cand", "cand@f32", specs[4]}
    assert len(board.pairs) == 3 and board.documents == 12


def test_each_run_is_as_if_measured_alone(swept: Sweep, specs: list[str], data: str) -> None:
    """The same rows and figures as of a run of that one candidate, and a folder that every command reads."""
    alone = evalgate.compare(specs[0], specs[1], data=data, context=32, device="cpu")
    found = swept["cand"]
    assert list(found.tokens.columns) == list(alone.tokens.columns)
    for name in ("document", "window", "position", "token", "ref_top1", "cand_top1"):
        assert (found.tokens[name].astype(str) == alone.tokens[name].astype(str)).all()
    assert np.abs(found.tokens.kl - alone.tokens.kl).max() < 1e-5
    assert found.manifest["identity"] == alone.manifest["identity"]
    assert found.manifest["request"]["candidates"][0]["spec"] == specs[1]
    assert found.token_texts == alone.token_texts
    assert found.summary.ranking is None and len(found.summary.comparisons) == 1
    where = str(swept.folder / "runs" / "cand")
    assert call("show", where)[0] == 0 and call("gate", "--max", "kl=9", "--run", where)[0] == 0
    assert call("compare", where, str(swept.folder / "runs" / "ref-bf16"), "--metric", "kl")[0] == 0


def test_folder_holds_every_output(swept: Sweep) -> None:
    names = {path.name for path in swept.folder.iterdir()}
    outputs = {f"sweep.{end}" for end in ("json", "html", "svg", "png", "md", "csv")}
    assert names == {*outputs, "eval_results", "runs", PROGRESS} and swept.left_out == ()
    assert {path.name for path in (swept.folder / "eval_results").iterdir()} == {
        "cand.yaml",
        "cand-f32.yaml",
        "ref-bf16.yaml",
    }
    assert load_sweep(swept.folder).board == swept.board
    code, shown = call("show", str(swept.folder))
    assert code == 0 and "evalgate sweep against" in shown
    assert json.loads(call("show", str(swept.folder), "--json")[1]) == swept.board.model_dump(mode="json")
    assert call("show", str(swept.folder), "--markdown")[1] == (swept.folder / "sweep.md").read_text()


def test_frame_and_repr(swept: Sweep) -> None:
    frame = swept.frame
    best = swept.board.entries[0].kl
    assert best is not None and best.value is not None
    assert frame.candidate.iloc[0] == "ref@bf16" and frame.kl.iloc[0] == best.value.value
    assert frame.kl.isna().sum() == 1 and len(frame) == 4
    assert "3 of 4 candidates measured" in repr(swept)
    assert "<svg" in swept._repr_html_() and "<script" not in swept._repr_html_()
    with pytest.raises(UsageError, match="no candidate 'x'"):
        _ = swept["x"]
    with pytest.raises(UsageError, match="was not measured"):
        swept[swept.board.entries[-1].name]


def test_the_same_command_measures_nothing_twice(
    swept: Sweep, specs: list[str], data: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All candidates are taken over without a server; another sweep's folder is refused, another list extends it."""
    monkeypatch.setattr(EmbeddedServer, "start", lambda server: pytest.fail("a server was started"))
    options: dict[str, Any] = {"data": data, "context": 32, "device": "cpu"}
    again = evalgate.sweep(specs[0], specs[1:4], out=swept.folder, **options)
    assert [entry.kl for entry in again.board.measured] == [entry.kl for entry in swept.board.measured]
    assert again.board.seconds == swept.board.seconds
    fewer = evalgate.sweep(specs[0], {"mine": specs[1]}, out=swept.folder, sizes={specs[1]: 4242}, **options)
    (entry,) = fewer.board.entries
    assert (
        entry.name == "mine" and entry.size is not None and (entry.size.bytes, entry.size.counted) == (4242, "as given")
    )
    assert {path.name for path in (swept.folder / "eval_results").iterdir()} == {"mine.yaml"}
    with pytest.raises(UsageError, match="another options: choose another --out"):
        evalgate.sweep(specs[0], specs[1:2], out=swept.folder, **{**options, "context": 16})
    with pytest.raises(UsageError, match="holds something that is not a sweep"):
        evalgate.sweep(specs[0], specs[1:2], out=data, **options)
    evalgate.sweep(specs[0], specs[1:4], out=swept.folder, **options)  # as it was


def test_an_interrupted_sweep_goes_on(
    specs: list[str], data: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows that were scored before the interrupt are not scored again, and the folder is found without --out."""
    monkeypatch.chdir(place)
    monkeypatch.setattr("evalgate.server.batches.BATCH_TOKENS", 128)
    asked: list[int] = []
    score = EmbeddedClient.score

    def counting(client: EmbeddedClient, names: Sequence[str], windows: Sequence[Any], **more: Any) -> Any:
        asked.append(len(windows))
        return score(client, names, windows, **more)

    class Stops:
        def __init__(self, after: int) -> None:
            self.left, self.total = after, 0

        def stage(self, text: str) -> None: ...
        def finish(self) -> None: ...
        def start(self, *, windows: int, positions: int) -> None:
            self.total = windows

        def advance(self, *, windows: int, positions: int, running: dict[str, float]) -> None:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

    monkeypatch.setattr(EmbeddedClient, "score", counting)
    options: dict[str, Any] = {"data": data, "context": 32, "device": "cpu", "seed": 5}
    with pytest.raises(KeyboardInterrupt):
        evalgate.sweep(specs[0], specs[1:3], observer=Stops(3), **options)
    (folder,) = (place / "runs").iterdir()
    assert {path.name for path in folder.iterdir()} == {PROGRESS}
    code, _ = call("show", str(folder))
    assert code == 2
    before = sum(asked)
    asked.clear()
    whole = Stops(-1)
    done = evalgate.sweep(specs[0], specs[1:3], observer=whole, **options)
    assert done.folder.resolve() == folder and len(done.board.measured) == 2
    assert 0 < sum(asked) <= whole.total - 3 and before > 0
    with pytest.raises(InputError, match="is not a sweep"):
        load_sweep(place)


def test_a_candidate_that_breaks_the_measurement_is_found(
    specs: list[str], data: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group is halved until the culprit is alone; the others are measured."""
    score, groups = EmbeddedClient.score, []

    def breaking(client: EmbeddedClient, names: Sequence[str], windows: Sequence[Any], **more: Any) -> Any:
        groups.append(tuple(names))
        if specs[2] in names:
            raise ServerError("cand@f32 gives a non-finite nll at window 1, position 2")
        return score(client, names, windows, **more)

    monkeypatch.setattr(EmbeddedClient, "score", breaking)
    done = evalgate.sweep(specs[0], specs[1:4], data=data, context=32, device="cpu", out=place / "broken")
    assert [entry.name for entry in done.board.entries] == ["ref@bf16", "cand", "cand@f32"]
    assert "non-finite nll" in done.board.entries[-1].reason
    assert set(groups) == {tuple(specs[1:4]), (specs[1],), tuple(specs[2:4]), (specs[2],), (specs[3],)}


def test_what_does_not_fit_is_measured_in_a_further_round(
    specs: list[str], data: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[list[str]] = []
    start = EmbeddedServer.start

    def narrow(server: EmbeddedServer) -> None:
        start(server)
        rounds.append(list(server._specs[1:]))
        server.failed, server.no_room = {}, list(server._specs[2:])

    monkeypatch.setattr(EmbeddedServer, "start", narrow)
    done = evalgate.sweep(specs[0], specs[1:4], data=data, context=32, device="cpu", out=place / "narrow")
    assert rounds == [specs[1:4], specs[2:4], specs[3:4]]
    assert len(done.board.measured) == 3 and len(done.board.pairs) == 3
    progress = read_progress(place / "narrow")
    assert progress is not None and list(progress.done) == specs[1:4] and progress.context == 32


def test_a_changed_model_is_measured_again(tiny: tuple[str, str], specs: list[str], data: str, place: Path) -> None:
    import os
    import shutil

    mine = place / "mine"
    shutil.copytree(tiny[1], mine)
    options: dict[str, Any] = {"data": data, "context": 32, "device": "cpu", "out": place / "changed", "limit": 2}
    first = evalgate.sweep(specs[0], [str(mine)], **options)
    (run,) = (place / "changed" / "runs").iterdir()
    before = run.stat().st_mtime_ns
    os.utime(mine / "model.safetensors", ns=(1, 1))
    again = evalgate.sweep(specs[0], [str(mine)], **options)
    assert run.stat().st_mtime_ns != before and again.board.entries[0].kl == first.board.entries[0].kl


def test_without_any_candidate_there_is_no_sweep(specs: list[str], data: str, place: Path) -> None:
    """Exit code 2 with every reason; a reference that cannot be loaded is named as what it is."""
    options = ("--data", data, "--context", "32", "--device", "cpu", "--quiet")
    code, text = call("sweep", "--ref", specs[0], "--cand", specs[4], *options, "--out", str(place / "none"), "--json")
    assert code == 2 and "no candidate could be measured" in json.loads(text)["error"]["message"]
    assert not (place / "none" / "sweep.json").exists()
    with pytest.raises(ReferenceFailed, match="does not exist"):
        evalgate.sweep(specs[4], specs[1:2], data=data, out=place / "noref", device="cpu")
    with pytest.raises(SourceError, match="no candidate"):
        evalgate.sweep(specs[0], specs[4:], data=data, out=place / "none2", device="cpu")


def test_refusals_come_before_any_model(specs: list[str], data: str, place: Path) -> None:
    for options, words in (
        (["--ref", specs[0]], "needs candidates"),
        (["--cand", specs[1]], "needs a reference"),
        (["--ref", specs[0], "--cand", specs[1], "--data", "-"], "not standard input"),
        (["--ref", specs[0], "--cand", specs[1], "--budget", "requests=3"], "--budget limits"),
        (["--ref", specs[0], "--cand", specs[1], "--json", "--csv"], "2 documents"),
        (["--ref", specs[0], "--cand", specs[1], "--cand", "x.trace"], "can only be the reference"),
        (["nothing.toml"], "cannot read nothing.toml"),
    ):
        code, text = call("sweep", *options, *([] if "--json" in options else ["--json"]))
        assert code == 2 and words in json.loads(text)["error"]["message"], options


def test_against_a_trace_and_endpoints(tiny: tuple[str, str], specs: list[str], data: str, place: Path) -> None:
    """A recorded reference costs nothing, and each candidate is measured alone; an endpoint is a row with bounds."""
    ref, cand = tiny
    where = ("--data", data, "--context", "32", "--device", "cpu", "--limit", "8", "--quiet")
    trace = str(place / "ref.trace")
    assert call("record", "--ref", ref, *where, "--out", trace)[0] == 0
    code, text = call("sweep", "--ref", trace, "--cand", cand, "--cand", f"{ref}@bf16", "--cand", specs[4],
                  *("--device", "cpu", "--quiet", "--json", "--out", str(place / "traced")))  # fmt: skip
    entries = json.loads(text)["entries"]
    assert code == 0 and [entry["kl"] and entry["kl"]["exactness"] for entry in entries] == ["estimated"] * 2 + [None]
    with (
        EmbeddedServer([cand], device="cpu", options=["--max-logprobs", "-1"]) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("KEY", server.key)
        down = f"{server.url.rpartition(':')[0]}:9/v1"
        code, text = call(
            *("sweep", "--ref", ref, "--cand", f"{ref}@bf16", "--cand", f"{server.url}/v1", "--cand", down, *where),
            *("--api-key-env", "KEY", "--patience", "0", "--json", "--out", str(place / "asked")),
        )
    entries = json.loads(text)["entries"]
    assert code == 0 and [entry["kl"] and entry["kl"]["exactness"] for entry in entries] == ["exact", "bounded", None]
    assert entries[1]["kl"]["value"] is None and entries[1]["size"] is None and entries[1]["place"]["best"] == 2
