"""A real server killed at 30, 60 and 90 % of a run, started again each time, and one of four that share the work.

The result is that of a quiet run.
"""

import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import ExitStack, contextmanager

import pytest

from evalgate.endpoints.settings import EndpointSettings
from evalgate.endpoints.source import EndpointSource
from evalgate.errors import EndpointError
from evalgate.measure.run import RunRequest, run
from tests.serve.serving import served
from tests.serve.tiny_models import byte_level, llama, save
from tests.stuck import STUCK

pytestmark = pytest.mark.slow


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write(folder):
    folder.mkdir()
    for n in range(20):
        (folder / f"{n:02}.txt").write_text(
            f"{n} hello world, the quick brown fox says hi {n}; assistant says hello {n}"
        )
    return str(folder)


@contextmanager
def server(model, port, **where):
    command = [sys.executable, "-m", "serve", str(model), "--port", str(port), "--device", "cpu", "--deterministic"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ}, **where
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(port):
    until = time.monotonic() + STUCK
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=STUCK).close()
            return
        except OSError:
            time.sleep(0.1)


def killer(process, folder, count):
    """Kill the process as soon as `count` windows of the second source are kept."""
    until = time.monotonic() + STUCK
    while len(list(folder.glob("*/answers-1/*.parquet"))) < count and time.monotonic() < until:
        time.sleep(0.002)
    process.kill()


def test_killed_started_again_and_resumed(tmp_path, monkeypatch):
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "cache"))
    text = write(tmp_path / "text")
    model = save(llama(), tmp_path / "model", byte_level(bos=True))
    port = free_port()
    # one request at a time: what a batch holds moves the last digits
    settings = EndpointSettings(concurrency=1, patience=0.3)

    with served(model=llama(), tokenizer=byte_level(bos=True), deterministic=True) as reference:

        def measure(out):
            urls = (f"{reference.url}/v1", (f"http://127.0.0.1:{port}/v1",))
            return run(RunRequest.of("kl", *urls, data=text, context=16, out=out, endpoint=settings))

        kept, total = tmp_path / "cache" / "partial", 0
        for share in (0.3, 0.6, 0.9):
            with server(model, port) as process:
                wait_for(port)
                total = total or len(set(measure(tmp_path / "quiet").tokens.window))
                watch = threading.Thread(target=killer, args=(process, kept, round(share * total)), daemon=True)
                watch.start()
                with pytest.raises(EndpointError, match="is it running"):
                    measure(tmp_path / "again")
                watch.join()
        with server(model, port):
            wait_for(port)
            measure(tmp_path / "again")
    quiet, again = (
        hashlib.sha256((tmp_path / name / "tokens.parquet").read_bytes()).hexdigest() for name in ("quiet", "again")
    )
    assert quiet == again


def test_one_of_four_is_killed_and_the_others_do_the_rest(tmp_path, monkeypatch):
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "cache"))
    text, port = write(tmp_path / "text"), free_port()
    save(llama(), tmp_path / "tiny", byte_level(bos=True))  # the model's name, as the servers in this process have it
    dying, settings = f"http://127.0.0.1:{port}", EndpointSettings(concurrency=1, patience=0.3)
    taken, answered = [], []
    ask = EndpointSource.score

    def watched(source, channel, window, *rest, **more):
        taken.append((channel.url, window.index))
        if [url for url, _ in taken].count(dying) == 4 and channel.url == dying:
            process.kill()
            process.wait()
        found = ask(source, channel, window, *rest, **more)
        answered.append((channel.url, window.index))
        return found

    with ExitStack() as stack:
        process = stack.enter_context(server("tiny", port, cwd=tmp_path))
        reference, *others = (
            stack.enter_context(served(model=llama(), tokenizer=byte_level(bos=True), deterministic=True)).url
            for _ in range(4)
        )

        def measure(*urls):
            spec = ",".join(f"{url}/v1" for url in urls)
            return run(RunRequest.of("kl", f"{reference}/v1", (spec,), data=text, context=16, endpoint=settings))

        quiet = measure(others[0])
        wait_for(port)
        monkeypatch.setattr(EndpointSource, "score", watched)
        shared = measure(others[0], dying, *others[1:])

    assert shared.tokens.drop(columns="candidate").equals(quiet.tokens.drop(columns="candidate"))
    assert shared.summary.comparisons[0].overall == quiet.summary.comparisons[0].overall
    assert f"{dying} stopped answering; the other URLs took over its windows" in shared.summary.notes
    by_url = {url: [window for at, window in answered if at == url] for url in (dying, *others)}
    unanswered = {window for url, window in taken if url == dying} - set(by_url[dying])
    windows = [window for found in by_url.values() for window in found]
    assert len(by_url[dying]) == 3 and unanswered and all(by_url[url] for url in others)
    # Each window is answered once; at the end every URL that is left is asked one of its windows again.
    assert set(windows) == set(quiet.tokens.window) and len(windows) - len(set(windows)) <= len(others)
