"""Kept servers: found where nothing differs, and by nobody else; listed, ended, and ended by idleness."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from evalgate.errors import ServerError, UsageError
from evalgate.server import kept
from evalgate.server.kept import Kept, KeptServer, all_kept, files_of, find, keep, setting_of
from evalgate.server.process import EmbeddedServer
from tests.stuck import STUCK

OPTIONS = ["--logits", "float32"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A process that stands for the server's."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture
def port() -> Iterator[int]:
    """Where somebody answers who has the key `secret`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.headers["Authorization"] == "Bearer secret" else 401)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@pytest.fixture
def known(model: Path, sleeper: int, port: int) -> Kept:
    """A kept server of the model, written down."""
    spec = str(model)
    setting = setting_of("cpu", OPTIONS)
    made = Kept(
        sleeper, kept._started(sleeper), port, "secret", setting, {spec: files_of(spec)}, created=time.time(), idle=60.0
    )
    kept._make_folder()
    kept._write(made)
    return made


def looked(spec: Path | str, **other: object) -> tuple[KeptServer | None, list[str]]:
    said: list[str] = []
    given: dict[str, object] = {"device": "cpu", "options": OPTIONS} | other
    return find([str(spec)], on_stage=said.append, **given), said  # type: ignore[arg-type]


def test_what_is_the_same_is_found_and_left_running(known: Kept, model: Path) -> None:
    found, said = looked(model)
    assert found is not None and said == [f"using the kept server (process {known.pid})"]
    with found as server:
        assert (server.key, server.port, server.pid) == ("secret", known.port, known.pid)
    assert known.alive
    assert all_kept() == [known]
    with pytest.raises(ServerError, match="is not started again"):
        found.start()
    assert "gave no answer" in str(found.failure("a timeout"))
    found.stop()
    assert all_kept() == []
    assert "has ended: run the command again" in str(found.failure("closed"))


def test_files_that_changed_are_other_files(known: Kept, model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"WEIGHTS")
    assert looked(model) == (
        None,
        [f"not using the kept server (process {known.pid}): the files of {model} have changed"],
    )


def test_a_file_that_came_is_a_change(known: Kept, model: Path) -> None:
    (model / "adapter_config.json").write_text("{}")
    assert looked(model)[0] is None


def test_a_replaced_file_with_its_old_size_and_time_is_a_change(known: Kept, model: Path) -> None:
    file = model / "model.safetensors"
    before = file.stat()
    other = model.parent / "other"
    other.write_bytes(b"WEIGHTS")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(file)
    assert looked(model)[0] is None


@pytest.mark.parametrize(
    ("other", "said"),
    [({"device": "cuda"}, "another --device"), ({"options": ["--logits", "model"]}, "other options")],
)
def test_another_setting_is_not_used(known: Kept, model: Path, other: dict[str, object], said: str) -> None:
    found, reasons = looked(model, **other)
    assert found is None and said in reasons[0]


@pytest.mark.parametrize("name", sorted(kept._NAMES))
def test_every_part_of_the_setting_counts(known: Kept, model: Path, name: str) -> None:
    kept._write(replace(known, setting=known.setting | {name: "other"}))
    found, reasons = looked(model)
    assert found is None and reasons == [f"not using the kept server (process {known.pid}): {kept._NAMES[name]}"]


def test_the_environment_counts_and_is_not_written_down(
    known: Kept, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "a secret word")
    assert looked(model)[0] is None
    kept._write(replace(known, setting=setting_of("cpu", OPTIONS)))
    assert looked(model)[0] is not None
    assert "a secret word" not in known.file.read_text()


def test_models_that_it_does_not_hold_are_not_asked_of_it(known: Kept, tmp_path: Path) -> None:
    assert looked(tmp_path / "another") == (None, [])


def test_a_process_that_ended_is_forgotten(known: Kept, model: Path) -> None:
    known.end()
    kept._write(known)
    assert looked(model) == (None, []) and not known.file.exists()


def test_another_process_of_the_same_number_is_neither_used_nor_ended(known: Kept, model: Path) -> None:
    other = replace(known, started="1 another boot")
    kept._write(other)
    assert looked(model)[0] is None
    other.end()
    assert known.alive


def test_one_that_does_not_answer_is_not_used(known: Kept, model: Path) -> None:
    kept._write(replace(known, key="wrong"))
    found, reasons = looked(model)
    assert found is None and reasons == [f"not using the kept server (process {known.pid}): it does not answer"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_may_read_or_write_is_not_believed(known: Kept, model: Path, mode: int) -> None:
    known.file.chmod(mode)
    assert looked(model) == (None, [])


def test_a_folder_that_others_may_open_is_not_believed(known: Kept, model: Path) -> None:
    known.file.parent.chmod(0o755)
    assert looked(model) == (None, []) and all_kept() == []
    with pytest.raises(UsageError, match="open to others"):
        kept._make_folder()


def test_another_users_file_is_not_believed(known: Kept, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert looked(model) == (None, [])


def test_a_link_is_not_followed(known: Kept, model: Path, tmp_path: Path) -> None:
    aside = tmp_path / "aside.json"
    known.file.rename(aside)
    known.file.symlink_to(aside)
    assert looked(model) == (None, [])


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"format": 1}', '{"format": 2}', '{"format": 1, "pid": "x"}'],
)
def test_a_damaged_file_is_no_server(known: Kept, model: Path, content: str) -> None:
    known.file.write_text(content)
    assert looked(model) == (None, [])
    whole = {"format": 1, **asdict(known)}
    for name, value in (("pid", -1), ("port", True), ("files", []), ("created", "now")):
        known.file.write_text(json.dumps(whole | {name: value}))
        assert looked(model) == (None, [])


def test_a_recipe_is_a_file_of_the_model(model: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mix.toml"
    recipe.write_text("x = 1")
    assert files_of(f"{model}@{recipe}")[-1][0] == str(recipe)
    assert files_of(f"{model}@int8") == files_of(str(model))
    assert files_of(str(tmp_path / "nowhere")) == []


def test_files_that_change_during_the_load_are_not_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(EmbeddedServer, "start", lambda self: (model / "config.json").write_text('{"other": 1}'))
    monkeypatch.setattr(EmbeddedServer, "stop", lambda self: ended.append(1))
    with pytest.raises(ServerError, match="changed while it was loaded"):
        keep([str(model)], device="cpu", logits="float32", idle=1.0, on_stage=lambda _: None)
    assert ended and all_kept() == []


@pytest.mark.slow
def test_a_kept_server_gives_the_figures_of_a_fresh_one_and_ends_when_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import evalgate
    from tests.checkpoints import pair

    ref, cand = pair(tmp_path / "models")
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)

    def measured() -> dict[str, object]:
        run = evalgate.compare(ref, cand, data=text, context=32, device="cpu")
        document: dict[str, object] = run.summary.model_dump()["comparisons"][0]["overall"]
        return document

    fresh = measured()
    first = keep([ref, cand], device="cpu", logits="float32", idle=1000.0, on_stage=lambda _: None)
    try:
        assert keep([cand, ref], device="cpu", logits="float32", idle=5.0, on_stage=lambda _: None) == first
        assert (first.file.stat().st_mode & 0o777, first.file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        with monkeypatch.context() as patch:
            patch.setattr(EmbeddedServer, "start", lambda self: pytest.fail("a server was started"))
            assert measured() == fresh and measured() == fresh
        assert first.alive
    finally:
        first.end()
    second = keep([ref], device="cpu", logits="float32", idle=0.2, on_stage=lambda _: None)
    until = time.monotonic() + STUCK
    while second.alive and time.monotonic() < until:
        time.sleep(0.05)
    assert not second.alive and all_kept() == []
