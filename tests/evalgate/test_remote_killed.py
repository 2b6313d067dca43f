"""A real server killed at 30, 60 and 90 % of a run, started again each time: the result is that of a quiet run."""

import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager

import pytest

from evalgate.endpoints.settings import EndpointSettings
from evalgate.errors import EndpointError
from evalgate.pipeline import RunRequest, run
from tests.serve.serving import served
from tests.serve.tiny_models import byte_level, llama, save


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def server(model, port):
    command = [sys.executable, "-m", "serve", str(model), "--port", str(port), "--device", "cpu", "--deterministic"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ})
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield process
    finally:
        process.kill()
        process.wait()


def killer(process, folder, count):
    """Kill the process as soon as `count` windows of the second source are kept."""
    until = time.monotonic() + 60
    while len(list(folder.glob("*/answers-1/*.parquet"))) < count and time.monotonic() < until:
        time.sleep(0.002)
    process.kill()


@pytest.mark.timeout(300)
def test_killed_started_again_and_resumed(tmp_path, monkeypatch):
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text"
    text.mkdir()
    for n in range(20):
        (text / f"{n:02}.txt").write_text(f"{n} hello world, the quick brown fox says hi {n}; assistant says hello {n}")
    model = save(llama(), tmp_path / "model", byte_level(bos=True))
    port = free_port()
    # one request at a time: what a batch holds moves the last digits
    settings = EndpointSettings(concurrency=1, patience=0.3)

    with served(model=llama(), tokenizer=byte_level(bos=True), deterministic=True) as reference:

        def measure(out):
            urls = (f"{reference.url}/v1", (f"http://127.0.0.1:{port}/v1",))
            return run(RunRequest("kl", *urls, data=str(text), context=16, out=out, endpoint=settings))

        kept, total = tmp_path / "cache" / "partial", 0
        for share in (0.3, 0.6, 0.9):
            with server(model, port) as process:
                total = total or len(set(measure(tmp_path / "quiet").tokens.window))
                watch = threading.Thread(target=killer, args=(process, kept, round(share * total)), daemon=True)
                watch.start()
                with pytest.raises(EndpointError, match="is it running"):
                    measure(tmp_path / "again")
                watch.join()
        with server(model, port):
            measure(tmp_path / "again")
    quiet, again = (
        hashlib.sha256((tmp_path / name / "tokens.parquet").read_bytes()).hexdigest() for name in ("quiet", "again")
    )
    assert quiet == again
