"""The embedded server as a child process: it starts, answers, says why not, and never outlives its parent."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from evalgate.core import Document, Window
from evalgate.errors import ServerError
from evalgate.measure.recordings import ShownMean
from evalgate.server.batches import score_batches
from evalgate.server.client import EmbeddedClient
from evalgate.server.process import EmbeddedServer, module_command
from evalgate.store.partial import PartialRun
from tests.checkpoints import pair
from tests.stuck import STUCK

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(models: tuple[str, str]) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(models, device="cpu") as running:
        yield running


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return True


def gone(pid: int) -> bool:
    until = time.monotonic() + STUCK
    while alive(pid):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def test_it_answers_with_scores_in_their_places(server: EmbeddedServer, models: tuple[str, str]) -> None:
    with contextlib.closing(EmbeddedClient(server)) as client:
        assert set(client.models()) == set(models)
        document = client.tokenize(models[0], [Document("d", "prose", text="hello wörld <s>")])[0]
        assert sum(document.bytes_per_token) == len("hello wörld <s>".encode())
        assert document.prefix == (0,)
        assert 0 not in document.ids  # the special token's text is plain text
        window = Window(0, "d", "prose", document.ids, 1, len(document.ids), document.bytes_per_token)
        table = client.score([models[1]], [window], reference=models[0])
        assert table.num_rows == len(document.ids) - 1


def test_it_wants_its_key(server: EmbeddedServer) -> None:
    assert httpx2.get(f"{server.url}/v1/models", trust_env=False).status_code == 401
    wrong = httpx2.get(f"{server.url}/v1/models", headers={"Authorization": "Bearer x"}, trust_env=False)
    assert wrong.status_code == 401
    assert wrong.json()["error"]["type"] == "authentication_error"


def test_the_key_is_not_in_the_command_line(server: EmbeddedServer) -> None:
    command = Path(f"/proc/{server.pid}/cmdline")
    if command.exists():
        assert server.key.encode() not in command.read_bytes()


def test_it_is_gone_after_the_block(models: tuple[str, str]) -> None:
    with EmbeddedServer(models[:1], device="cpu") as running:
        pid = running.pid
        assert pid is not None and alive(pid)
    assert gone(pid)


_PARENT = """
import sys, time
from evalgate.server.process import EmbeddedServer, module_command
with EmbeddedServer([sys.argv[1]], device="cpu") as server:
    print(server.pid, flush=True)
    time.sleep(3600)
"""


@pytest.mark.parametrize("how", (signal.SIGKILL, signal.SIGINT, signal.SIGTERM))
def test_it_dies_with_its_parent(models: tuple[str, str], how: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, models[0]], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.send_signal(how)
        parent.wait(STUCK)
        assert gone(child)
    finally:
        parent.kill()
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()


def test_a_server_that_dies_during_a_request_is_named(models: tuple[str, str]) -> None:
    with EmbeddedServer(models[:1], device="cpu") as running, contextlib.closing(EmbeddedClient(running)) as client:
        assert running.pid is not None
        os.kill(running.pid, signal.SIGKILL)
        assert gone(running.pid)
        with pytest.raises(ServerError, match="killed, most likely for memory"):
            client.models()


@pytest.mark.usefixtures("own_process")
def test_ctrl_c_does_not_wait_for_the_requests_under_way(
    models: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalgate.server.process._STOP_SECONDS", 0.2)
    windows = [Window(i, "d", "prose", (0, 5, 6, 7), 1, 4, (0, 1, 1, 1)) for i in range(3)]
    with EmbeddedServer(models[:1], device="cpu") as running, contextlib.closing(EmbeddedClient(running)) as client:
        assert running.pid is not None
        os.kill(running.pid, signal.SIGSTOP)  # a batch that takes for ever
        found = score_batches(
            windows,
            lambda part: client.score(models[:1], part, reference=None),
            names=models[:1],
            running=ShownMean("cand_nll", "nll").values,
            partial=PartialRun(tmp_path),
            abandon=client.abandon,
        )
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            next(found)
        assert running.pid is None


@pytest.mark.usefixtures("own_process")
def test_a_server_killed_during_a_request_is_named(models: tuple[str, str]) -> None:
    with EmbeddedServer(models[:1], device="cpu") as running, contextlib.closing(EmbeddedClient(running)) as client:
        pid = running.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(ServerError, match="killed, most likely for memory"):
            client.models()


@pytest.mark.parametrize(
    ("spec", "says"),
    (
        ("/no/such/folder", "/no/such/folder"),
        ("missing.gguf", "missing.gguf"),
        ("demo@int5", "unknown conversion '@int5'"),
        ("demo@int8@bf16", "one conversion is possible: write demo@int8 or demo@bf16$"),
        ("demo@int8@int8", "one conversion is possible: write demo@int8$"),
        ("nobody/nothing-here", "nobody/nothing-here"),
    ),
)
def test_what_cannot_be_loaded_is_said_in_one_sentence(spec: str, says: str) -> None:
    with pytest.raises(ServerError, match=says) as caught:
        EmbeddedServer([spec], device="cpu").start()
    assert "Traceback" not in caught.value.message
    assert "\n" not in caught.value.message


def test_a_port_in_use_is_refused_by_name(models: tuple[str, str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "serve", models[0], "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=STUCK,
        )
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wide_bind_without_a_key_is_refused(models: tuple[str, str]) -> None:
    clean = {k: v for k, v in os.environ.items() if k != "EVALGATE_API_KEY"}
    done = subprocess.run(
        [sys.executable, "-m", "serve", models[0], "--host", "0.0.0.0", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=STUCK,
        env=clean,
    )
    assert done.returncode == 2
    assert "EVALGATE_API_KEY" in done.stderr


@pytest.mark.usefixtures("own_process")
def test_a_serve_in_the_working_directory_is_not_executed(
    models: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files named like ours and like libraries, as an untrusted checkout may have them."""
    mark = tmp_path / "executed"
    bad = f"open({str(mark)!r}, 'w').write('x')"
    for name in ("serve.py", "evalgate.py", "torch.py", "runpy.py", "typer.py"):
        (tmp_path / name).write_text(bad)
    for name in ("serve", "transformers"):
        (tmp_path / name).mkdir()
        for file in ("__init__.py", "__main__.py", "llamacpp.py", "wire.py"):
            (tmp_path / name / file).write_text(bad)
    monkeypatch.chdir(tmp_path)
    with EmbeddedServer(models[:1], device="cpu") as server, contextlib.closing(EmbeddedClient(server)) as client:
        assert set(client.models()) == {models[0]}
    for module in ("serve", "serve.llamacpp"):
        done = subprocess.run([*module_command(module), "--help"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and module in done.stdout
    assert not mark.exists()
