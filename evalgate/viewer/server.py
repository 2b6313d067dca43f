"""The viewer's server: loopback alone, reading alone, and only for a browser that asked for this machine by name.

A web page can point its own domain at 127.0.0.1, so a request whose Host is another name is refused. Files come from a
short list of names inside folders that were found, never from a path that a request spells. What others may have
written (a run's report) is shown in a sandbox: it can neither read other runs nor ask for anything.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO
from urllib.parse import parse_qs, unquote, urlsplit

from evalgate.errors import EvalgateError, UsageError
from evalgate.store.sweeps import RUNS
from evalgate.viewer import pages
from evalgate.viewer.found import Found, Library

ADDRESS = "127.0.0.1"
_LONGEST = 2000  # characters of a request's target
_IDLE = 30.0  # seconds
_INLINE = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'"
_OWN = f"{_INLINE}; form-action 'self'; frame-ancestors 'none'"
_THEIRS = f"{_INLINE}; form-action 'none'; frame-ancestors 'none'; sandbox allow-scripts"
_RUN_FILES = {pages.REPORT: "text/html", "summary.json": "application/json"}
_SWEEP_FILES = {
    pages.SWEEP_PAGE: "text/html",
    "sweep.json": "application/json",
    "sweep.csv": "text/csv",
    "sweep.md": "text/plain",
    "sweep.svg": "image/svg+xml",
    "sweep.png": "image/png",
}
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")  # the name of a run folder in a sweep (evalgate.store.sweeps)


class Viewer:
    """A running server over some folders; `serve` answers until it is interrupted, and the block's end stops it."""

    def __init__(self, roots: Sequence[Path], *, port: int = 0) -> None:
        """port: 0 = a free one. Raises UsageError where the port is taken."""
        self.library = Library(roots)
        self.names = [str(root) for root in roots]
        try:
            self._server = _Server((ADDRESS, port), self)
        except OSError as error:
            raise UsageError(
                f"cannot listen on {ADDRESS}:{port} ({error.strerror or error}): choose another --port"
            ) from None
        self.port = int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """Where a browser finds it."""
        return f"http://{ADDRESS}:{self.port}/"

    def serve(self) -> None:
        """Answer requests until `stop`, or until the process is interrupted."""
        self._server.serve_forever(poll_interval=0.2)

    def stop(self) -> None:
        """Stop answering; for another thread than the one in `serve`."""
        self._server.shutdown()

    def close(self) -> None:
        """Give the port back."""
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 32

    def __init__(self, address: tuple[str, int], viewer: Viewer) -> None:
        self.viewer = viewer
        super().__init__(address, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "evalgate", ""
    timeout = _IDLE
    server: _Server

    def do_GET(self) -> None:
        """Answer a page or a file."""
        refused = self._refusal()
        if refused is not None:
            self._text(*refused)
            return
        parts = urlsplit(self.path)
        try:
            self._answer(parts.path, parse_qs(parts.query, max_num_fields=8))
        except (LookupError, ValueError):
            self._text(HTTPStatus.NOT_FOUND, "there is nothing here; / lists all runs")
        except EvalgateError as error:
            self._text(HTTPStatus.NOT_FOUND, error.message)

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        """Refuse every other method."""
        self.close_connection = True  # a body may follow
        self._text(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered here")

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = do_POST  # noqa: N815

    def _refusal(self) -> tuple[HTTPStatus, str] | None:
        port = self.server.viewer.port
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or hosts[0].lower() not in (f"{ADDRESS}:{port}", f"localhost:{port}"):
            return HTTPStatus.FORBIDDEN, f"ask for {self.server.viewer.url}, by this name"
        if len(self.path) > _LONGEST:
            return HTTPStatus.REQUEST_URI_TOO_LONG, "the address is too long"
        return None

    def _answer(self, path: str, query: dict[str, list[str]]) -> None:
        viewer = self.server.viewer
        if path == "/":
            self._page(pages.index(viewer.library.found(), viewer.names))
            return
        if path == "/pair":
            self._page(pages.pair(self._chosen(query, "a"), self._chosen(query, "b")))
            return
        _, kind, key, *rest = path.split("/")
        one = viewer.library.get(key)
        if one is None or one.reason or (one.board is not None) != (kind == "sweep"):
            raise LookupError(path)
        names = [unquote(part) for part in rest]
        if kind == "run" and names == [pages.BLOCK]:
            self._page(pages.block(one))
        else:
            self._file(one, *_place(kind, names))

    def _chosen(self, query: dict[str, list[str]], name: str) -> tuple[Found, int]:
        (choice,) = query[name]
        key, _, place = choice.partition(".")
        one = self.server.viewer.library.get(key)
        if one is None or not (place.isascii() and place.isdigit()):
            raise LookupError(name)
        return one, int(place)

    def _file(self, one: Found, parts: Sequence[str], kind: str) -> None:
        """A file of a run or sweep, if it lies in its folder whatever links there are."""
        place = one.path.joinpath(*parts).resolve()
        if not place.is_relative_to(one.path.resolve()) or not place.is_file():
            raise LookupError(str(place))
        with place.open("rb") as file:
            self._send(HTTPStatus.OK, file, place.stat().st_size, kind, _THEIRS)

    def _page(self, text: str) -> None:
        self._bytes(HTTPStatus.OK, text, "text/html", _OWN)

    def _text(self, status: HTTPStatus, text: str) -> None:
        self._bytes(status, f"{text}\n", "text/plain", _OWN)

    def _bytes(self, status: HTTPStatus, text: str, kind: str, policy: str) -> None:
        from io import BytesIO

        body = text.encode("utf-8", "backslashreplace")
        self._send(status, BytesIO(body), len(body), kind, policy)

    def _send(self, status: HTTPStatus, body: BinaryIO, size: int, kind: str, policy: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8" if kind != "image/png" else kind)
        self.send_header("Content-Length", str(size))
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        if self.close_connection:
            self.send_header("Connection", "close")
        for name, value in (
            ("Content-Security-Policy", policy),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            shutil.copyfileobj(body, self.wfile)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of each request."""


def _place(kind: str, names: Sequence[str]) -> tuple[Sequence[str], str]:
    """Where a file lies in its folder, and its type. Raises LookupError for a name that is not on the list."""
    if kind == "sweep" and len(names) == 3 and names[0] == RUNS and _RUN.fullmatch(names[1]):
        return names, _RUN_FILES[names[2]]
    (name,) = names if len(names) == 1 else ("",)
    return [name], (_SWEEP_FILES if kind == "sweep" else _RUN_FILES)[name]
