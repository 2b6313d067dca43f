"""The viewer: what it finds, what it answers and what it refuses, with a browser and without."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalgate.errors import UsageError
from evalgate.store.runs import write_run
from evalgate.store.sweeps import Progress, write_progress
from evalgate.sweeps.outputs import write_outputs
from evalgate.viewer import Viewer
from evalgate.viewer.found import Library
from tests.browser import Chromium
from tests.evalgate.sample_run import source, summary
from tests.evalgate.sample_sweep import board, scaled
from tests.stuck import STUCK

HOSTILE = "<img src=x onerror=alert(1)>'\"&"


def stored(folder: Path, *names: str, factor: float = 1.0) -> Path:
    import pyarrow as pa

    table = pa.concat_tables([scaled(name, factor) for name in names]).unify_dictionaries()
    write_run(
        folder,
        manifest={},
        table=table,
        summary=summary(table, reference=source("demo"), created=f"2026-0{len(names)}"),
    )
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one with two candidates and a page of its own, one of hostile names, a sweep, and broken ones."""
    folder = tmp_path_factory.mktemp("view") / "runs"
    stored(folder / "plain", "demo@int8")
    stored(folder / "deep" / "er" / "two", "demo@bf16", "demo@f16", factor=2.0)
    (folder / "deep" / "er" / "two" / "report.html").write_text(
        "<!doctype html><title>own</title><p id='own'>own page</p>"
    )
    stored(folder / HOSTILE, HOSTILE)
    sample = board()
    for name in ("bf16", "Q8_0"):
        stored(folder / "sweep" / "runs" / name, name)
    (folder / "sweep" / "runs" / "bf16" / "report.html").write_text("<!doctype html><title>x</title>inside")
    write_outputs(folder / "sweep", sample)
    write_progress(folder / "half", Progress(inputs={}))
    stored(folder / "cut", "demo@cut")
    (folder / "cut" / "summary.json").write_text("{}")
    (folder / "empty").mkdir()
    stored(folder / ".hidden", "demo@hidden")
    token = folder / "elsewhere"
    token.symlink_to(folder.parent)
    return folder


@pytest.fixture(scope="module")
def viewer(place: Path) -> Iterator[Viewer]:
    made = Viewer([place])
    thread = threading.Thread(target=made.serve, daemon=True)
    thread.start()
    yield made
    made.stop()
    thread.join(STUCK)
    made.close()


def ask(
    viewer: Viewer, path: str, *, method: str = "GET", host: str | None = None
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", viewer.port, timeout=STUCK)
    connection.putrequest(method, path, skip_host=True)
    for name in (host if host is not None else f"127.0.0.1:{viewer.port}").split("\n"):
        if name != "-":
            connection.putheader("Host", name)
    connection.endheaders()
    reply = connection.getresponse()
    found = reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read()
    connection.close()
    return found


def key(place: Path, name: str) -> str:
    return next(one.key for one in Library([place]).found() if one.name == name)


def test_everything_below_is_found_and_what_is_broken_has_a_reason(place: Path) -> None:
    found = {one.name: one for one in Library([place]).found()}
    assert set(found) == {"plain", "deep/er/two", HOSTILE, "sweep", "sweep/runs/bf16", "sweep/runs/Q8_0", "half", "cut"}
    assert "was not finished" in found["half"].reason and "summary.json has 2 bytes" in found["cut"].reason
    assert found["sweep"].board == board().model_copy(update={"created": found["sweep"].board.created})  # type: ignore[union-attr]
    assert [one.name for one in Library([place / "plain"]).found()] == ["plain"]
    assert Library([place / "empty", place / "nowhere"]).found() == []


def test_a_folder_is_read_again_once_it_has_changed(place: Path, tmp_path: Path) -> None:
    library = Library([tmp_path])
    assert library.found() == []
    stored(tmp_path / "new", "a")
    (first,) = library.found()
    assert library.found()[0] is first and library.get(first.key) is first
    shutil.rmtree(tmp_path / "new")
    assert library.get(first.key) is None


def test_the_pages_and_files(viewer: Viewer, place: Path) -> None:
    status, headers, page = ask(viewer, "/")
    text = page.decode()
    assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
    assert (
        "demo@int8" in text and "demo@f16" in text and "closest to demo is bf16" in text and "was not finished" in text
    )
    assert "<img" not in text and "&lt;img src=x" in text
    sweep, two, plain = (key(place, name) for name in ("sweep", "deep/er/two", "plain"))
    for path, kind, words in (
        (f"/run/{two}/report.html", "text/html", b"own page"),
        (f"/run/{two}/summary.json", "application/json", b"schema_version"),
        (f"/run/{plain}/block", "text/html", b"Mean KLD"),
        (f"/sweep/{sweep}/sweep.html", "text/html", b"Leaderboard"),
        (f"/sweep/{sweep}/sweep.png", "image/png", b"PNG"),
        (f"/sweep/{sweep}/sweep.svg", "image/svg+xml", b"<svg"),
        (f"/sweep/{sweep}/runs/bf16/report.html", "text/html", b"inside"),
    ):
        status, headers, body = ask(viewer, path)
        assert status == 200 and headers["content-type"].startswith(kind) and words in body, path
        assert (
            headers["x-content-type-options"] == "nosniff"
            and "default-src 'none'" in headers["content-security-policy"]
        )
        assert ("sandbox" in headers["content-security-policy"]) == ("block" not in path)
        status, headers, body = ask(viewer, path, method="HEAD")
        assert status == 200 and int(headers["content-length"]) > 0 and body == b""
    assert b'href="runs/bf16/report.html"' in ask(viewer, f"/sweep/{sweep}/sweep.html")[2]


def test_two_candidates_side_by_side(viewer: Viewer, place: Path) -> None:
    plain, two = key(place, "plain"), key(place, "deep/er/two")
    status, _, body = ask(viewer, f"/pair?a={plain}.0&b={two}.1")
    text = body.decode()
    assert status == 200 and "A: plain" in text and "demo@f16" in text and "mean KLD, prose" in text
    assert "12 documents" in text and "McNemar" in text
    for query in (
        "",
        "?a=x",
        f"?a={plain}.0&b={two}.2",
        f"?a={plain}.-1&b={two}.0",
        f"?a={plain}.0&a={plain}.0&b={two}.0",
    ):
        assert ask(viewer, f"/pair{query}")[0] == 404, query
    cut = key(place, "cut")
    assert ask(viewer, f"/pair?a={plain}.0&b={cut}.0")[0] == 404


PATHS = """
/run/{two}/ /run/{two} /run/{two}/tokens.parquet /run/{two}/../plain/report.html /run //etc/passwd /etc/passwd
/run/{two}/..%2f..%2f..%2fsecret /run/{two}/%2e%2e/secret.txt /run/..%2f..%2fetc/passwd /%2e%2e/%2e%2e/x /favicon.ico
/sweep/{sweep}/progress.json /sweep/{sweep}/runs/bf16/tokens.parquet /sweep/{sweep}/runs/../sweep.html
/sweep/{sweep}/runs/%2e%2e/report.html /sweep/{sweep}/runs/Q8_0/report.html /sweep/{two}/sweep.html
/run/{sweep}/report.html /run/nothing/report.html /run/{two}/report.html%00 /run/{two}/block/more
/run/{cut}/summary.json /run/{two}/leak.html
"""


@pytest.mark.parametrize("path", PATHS.split())
def test_no_other_file_can_be_asked_for(viewer: Viewer, place: Path, path: str) -> None:
    (place.parent / "secret.txt").write_text("secret")
    keys = {name: key(place, full) for name, full in (("two", "deep/er/two"), ("sweep", "sweep"), ("cut", "cut"))}
    status, _, body = ask(viewer, path.format(**keys))
    assert status == 404 and b"secret" not in body


def test_a_link_out_of_a_run_is_not_followed(viewer: Viewer, place: Path, tmp_path: Path) -> None:
    run = stored(place / "linked", "demo@l")
    (tmp_path / "secret.html").write_text("secret")
    (run / "report.html").symlink_to(tmp_path / "secret.html")
    assert ask(viewer, f"/run/{key(place, 'linked')}/report.html")[0] == 404
    shutil.rmtree(run)


HOSTS = "evil.example evil.example:{port} 127.0.0.1 127.0.0.1:1 - 127.0.0.1:{port}.evil.example [::1]:{port}"


@pytest.mark.parametrize("host", [*HOSTS.split(), "127.0.0.1:{port}\nevil.example"])
def test_another_name_is_refused(viewer: Viewer, host: str) -> None:
    """A page that points its own domain here (DNS rebinding) sends that domain as the Host."""
    status, _, body = ask(viewer, "/", host=host.format(port=viewer.port))
    assert status in (400, 403) and b"demo" not in body
    assert ask(viewer, "/", host=f"localhost:{viewer.port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_only_reading_is_answered(viewer: Viewer, method: str) -> None:
    status, headers, _ = ask(viewer, "/", method=method)
    assert status == 405 and headers["allow"] == "GET, HEAD" and headers["connection"] == "close"


def test_nonsense_does_not_stop_it(viewer: Viewer) -> None:
    for raw in (b"\r\n\r\n", b"GET\r\n\r\n", b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\n\r\n", b"\x00\xff\r\n\r\n", b""):
        with socket.create_connection(("127.0.0.1", viewer.port), timeout=STUCK) as connection:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(100)
    assert ask(viewer, "/" + "a" * 3000)[0] == 414
    assert ask(viewer, "/")[0] == 200


def test_a_port_that_is_taken_is_named(viewer: Viewer, place: Path) -> None:
    with pytest.raises(UsageError, match=f"127.0.0.1:{viewer.port}.*choose another --port"):
        Viewer([place], port=viewer.port)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_stopped(place: Path, number: int) -> None:
    arguments = [sys.executable, "-m", "evalgate", "view", str(place / "plain")]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    port = int(url.rstrip("/").rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=STUCK)
    connection.request("GET", "/")
    assert b"demo@int8" in connection.getresponse().read()
    connection.close()
    os.kill(process.pid, number)
    _, said = process.communicate(timeout=STUCK)
    assert process.returncode == 0 and "Traceback" not in said and "stopped" in said


def test_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.evalgate.cli.test_cli import call

    monkeypatch.chdir(tmp_path)
    assert call("view", "x") == (2, "")
    with pytest.raises(UsageError, match="measure one"):
        from evalgate.cli.command import Invocation
        from evalgate.cli.view import view
        from tests.evalgate.cli.test_cli import MemoryOutput

        view(Invocation(MemoryOutput(), json=False, debug=False), None)


@pytest.mark.slow
def test_it_in_a_browser(viewer: Viewer, place: Path, chromium: Chromium) -> None:
    """No violation, no request beyond itself, nothing on the console; sorting, comparing and links are driven."""
    origin = viewer.url.rstrip("/")
    for dark in (False, True):
        for phone in (False, True):
            with chromium.open(viewer.url, dark=dark, phone=phone) as page:
                assert page.violations() == [] and page.overflow() == 0
                page.shot(f"view-{'dark' if dark else 'light'}-{'phone' if phone else 'desktop'}")
    with chromium.open(viewer.url, origin=origin) as page:
        page.get_by_role("button", name="mean KL").click()
        values = page.locator("tbody tr > :nth-child(6)").evaluate_all("cells => cells.map(c => Number(c.dataset.v))")
        assert values == sorted(values) and len(values) == 6
        page.get_by_label("A: plain, demo@int8").check()
        page.get_by_label("B: deep/er/two, demo@f16").check()
        page.get_by_role("button", name="Compare A with B").click()
        assert "Side by side" in page.locator("h1").inner_text() and "McNemar" in page.locator("pre").inner_text()
        assert page.violations() == []
        page.shot("view-pair")
        page.get_by_role("link", name="All runs").click()
        page.get_by_role("link", name="deep/er/two").first.click()
        assert page.locator("#own").inner_text() == "own page"
        page.go_back()
        page.get_by_role("link", name="sweep", exact=True).click()
        assert "Sweep against" in page.locator("h1").inner_text()
        page.locator("#theme").click()
        page.get_by_role("link", name="bf16").click()
        assert "inside" in page.locator("body").inner_text()
