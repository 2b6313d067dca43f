"""Networks in between, through the real client and on loopback: TLS with an own CA, a proxy, headers, keys."""

import json
import shutil
import socket
import ssl
import subprocess
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from evalgate.core import Document, Message, TokenizedDocument
from evalgate.dialects.base import Request
from evalgate.endpoints.certify import certify, choose_dialect, own_probe_text
from evalgate.endpoints.channel import Channel, EndpointDown
from evalgate.endpoints.settings import EndpointSettings
from evalgate.endpoints.texts import model_of, tokenize
from evalgate.errors import EndpointError, UsageError
from tests.evalgate.fake_endpoint import MODEL, Fake, serving

ASK = Request("POST", "/v1/completions", {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1, "logprobs": 2})


@contextmanager
def channel(url, *, key="k3y", trust_env=False, **options):
    found = Channel(url, EndpointSettings(**{"patience": 0.3, **options}), key=key, trust_env=trust_env)
    try:
        yield found
    finally:
        found.close()


@contextmanager
def listening(handler, *, context=None):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def listing_models(status, body, headers=()):
    """A handler whose /v1/models answers so."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args): ...

        def do_GET(self):
            self.send_response(status)
            for name, value in (("Content-Length", str(len(body))), *headers):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    return Handler


@pytest.mark.parametrize(
    ("status", "body", "headers", "said"),
    [
        (200, b"<html>hi</html>", (), "answered with HTML instead of JSON: the URL points at a web page or a proxy"),
        (200, b'{"data": [', (), "answered with broken JSON"),
        (200, b"[]", (), "answered with a JSON list instead of an object"),
        (404, b'{"error": {"message": "no route"}}', (), "refused (404: no route): check the URL"),
        (500, b"oops", (), "failed (500: oops): look at the server's log"),
        (302, b"", (("Location", "http://else/"),), "redirects to http://else/ (302): name the address that answers "),
        (401, b"{}", (), "refused (401: {}): check the API key"),
    ],
)
def test_without_a_model_s_name_it_is_said_what_the_list_of_models_was(status, body, headers, said):
    with listening(listing_models(status, body, headers)) as port, channel(f"http://127.0.0.1:{port}") as ch:
        with pytest.raises(EndpointError) as refused:
            model_of(ch, "")
        message = str(refused.value)
        assert message.startswith(f"{ch.url}/v1/models: {said}")
        assert message.endswith(f", or name the model yourself: {ch.url}/v1#MODEL") == (status not in (302, 401))


@pytest.mark.parametrize("body", [b"{}", b'{"data": 5}', b'{"data": [{"id": null}, 3]}'])
def test_a_list_without_names_asks_for_one(body):
    asked = pytest.raises(UsageError, match=r"does not say which model to ask: write .*#MODEL with the model's name")
    with listening(listing_models(200, body)) as port, channel(f"http://127.0.0.1:{port}") as ch, asked:
        model_of(ch, "")


def answering(seen):
    """A handler that notes each request's headers and answers with an object."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args): ...

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            seen.append({name.lower(): value for name, value in self.headers.items()})
            body = b'{"through": "tls"}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """Folder with ca.pem, and server.pem and server.key for 127.0.0.1 signed by it; other.pem signed nothing here."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates of this test")
    folder = tmp_path_factory.mktemp("ca")

    def openssl(*words):
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    # from Python 3.13 on certificates are checked strictly: a CA must say that it may sign
    signs = ("-addext", "keyUsage=critical,keyCertSign")
    for name in ("ca", "other"):
        files = ("-keyout", f"{name}.key", "-out", f"{name}.pem")
        openssl("req", "-x509", *curve, *signs, "-days", "2", "-subj", f"/CN={name} of a test", *files)
    openssl("req", *curve, "-subj", "/CN=server", "-keyout", "server.key", "-out", "server.csr")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    openssl("x509", "-req", "-in", "server.csr", *signed, "-out", "server.pem")
    return folder


@pytest.fixture
def secure(authority):
    """(URL of a TLS server, headers that it saw)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "server.pem", authority / "server.key")
    seen = []
    with listening(answering(seen), context=context) as port:
        yield f"https://127.0.0.1:{port}", seen


def test_a_ca_of_ones_own_is_trusted(authority, secure):
    url, seen = secure
    with channel(url, ca_file=str(authority / "ca.pem"), headers=(("X-Team", "blue"),)) as client:
        assert json.loads(client.send(ASK).body) == {"through": "tls"}
    assert seen[0]["authorization"] == "Bearer k3y"
    assert seen[0]["x-team"] == "blue"


@pytest.mark.parametrize("ca", ["", "other.pem"])
def test_a_server_that_no_trusted_ca_signed_gets_no_key(authority, secure, ca):
    url, seen = secure
    ca_file = str(authority / ca) if ca else ""
    with channel(url, ca_file=ca_file) as client, pytest.raises(EndpointDown, match="certificate verify failed"):
        client.send(ASK)
    assert seen == []


def test_a_certificate_for_another_name_is_refused(authority, secure):
    url, seen = secure
    wrong = url.replace("127.0.0.1", "localhost")
    with channel(wrong, ca_file=str(authority / "ca.pem")) as client, pytest.raises(EndpointDown, match="certificate"):
        client.send(ASK)
    assert seen == []


class Tunnel(BaseHTTPRequestHandler):
    """CONNECT alone: bytes both ways."""

    seen: list[tuple[str, str | None]]

    def log_message(self, *args): ...

    def do_CONNECT(self):
        self.seen.append((self.path, self.headers.get("Proxy-Authorization")))
        host, port = self.path.split(":")
        with socket.create_connection((host, int(port))) as far:
            self.send_response(200)
            self.end_headers()
            back = threading.Thread(target=self._pump, args=(far, self.connection), daemon=True)
            back.start()
            self._pump(self.connection, far)
            back.join(5)
        self.close_connection = True

    @staticmethod
    def _pump(source, target):
        try:
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return


@pytest.fixture
def tunnel():
    """(URL of a proxy, what it was asked for)."""
    handler = type("Noting", (Tunnel,), {"seen": []})
    with listening(handler) as port:
        yield f"http://127.0.0.1:{port}", handler.seen


def test_tls_goes_through_a_proxy_that_sees_no_key(authority, secure, tunnel):
    url, seen = secure
    proxy, connected = tunnel
    named = proxy.replace("http://", "http://me:secret@")
    with channel(url, ca_file=str(authority / "ca.pem"), proxy=named) as client:
        assert json.loads(client.send(ASK).body) == {"through": "tls"}
    ((target, credentials),) = connected
    assert url == f"https://{target}" and credentials == "Basic bWU6c2VjcmV0"
    assert "proxy-authorization" not in seen[0] and seen[0]["authorization"] == "Bearer k3y"


def test_the_environments_proxy_counts_unless_it_is_our_own_server(authority, secure, tunnel, monkeypatch):
    url, _ = secure
    proxy, connected = tunnel
    for name in ("no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", proxy)
    for trusted, times in ((False, 0), (True, 1)):
        with channel(url, ca_file=str(authority / "ca.pem"), trust_env=trusted) as client:
            assert client.send(ASK).status == 200
        assert len(connected) == times


def test_a_proxy_that_is_down_is_no_answer(secure):
    with channel(secure[0], proxy="http://127.0.0.1:9") as client, pytest.raises(EndpointDown, match="no answer"):
        client.send(ASK)


def test_no_key_no_header():
    with serving(Fake()) as fake, channel(fake.url, key=None) as client:
        assert client.send(ASK).status == 200
    assert "authorization" not in fake.headers[0]


def test_limits_seen_while_probing_are_certified():
    fake = Fake()
    fake.overload = ["0", "0.05"]
    fake.limits = {"X-RateLimit-Remaining-Requests": "17", "RateLimit-Limit": "20", "X-Other": "no"}
    with serving(fake), channel(fake.url) as client:
        found = certify(client, MODEL, own_probe_text(client, MODEL))
    assert (found.overloads, found.retry_after) == (2, 0.05)
    assert found.to_dict()["rate_limits"] == {"ratelimit-limit": "20", "x-ratelimit-remaining-requests": "17"}
    assert found.best == "prompt_logprobs"
    with serving(Fake()) as quiet, channel(quiet.url) as client:
        calm = certify(client, MODEL, own_probe_text(client, MODEL))
    assert (calm.overloads, calm.retry_after, calm.rate_limits) == (0, None, ())


def test_the_time_of_each_way_is_measured_and_lists_are_found():
    with serving(Fake(scoring=False)) as fake, channel(fake.url, concurrency=8) as client:
        found = certify(client, MODEL, own_probe_text(client, MODEL))
    assert (found.best, found.prompt_list, len(found.continuation_costs)) == ("continuation", 512, 5)
    assert all(c.seconds > 0 and c.computed is None for c in found.continuation_costs)
    assert found.cheapest == min(found.continuation_costs, key=lambda c: c.seconds)


def test_routes_refused_for_one_reason_share_it():
    """An address that answers everything with a web page: the reason is said once."""
    page = "answered with HTML instead of JSON"
    notes = (f"/v1/models: {page}", f"/generate: {page}", "the server adds a BOS: x", "/completion: refused")
    certificate = SimpleNamespace(tokenizer="unknown", best="", notes=notes)
    with pytest.raises(EndpointError) as refused:
        choose_dialect(certificate, "http://h", forced="")
    said = f"http://h cannot be scored: /v1/models, /generate: {page}; the server adds a BOS: x; /completion: refused"
    assert refused.value.message == said


def test_a_chat_with_a_plain_text_needs_no_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """No endpoint tells its chat template: a chat of ours is shown as its plain text, one of the user's is refused."""

    def own_details(channel: object, model: str, document: Document) -> TokenizedDocument:
        size = len(document.text.encode())
        return TokenizedDocument(document.name, document.domain, tuple(range(size)), (1,) * size)

    monkeypatch.setattr("evalgate.endpoints.texts._own_details", own_details)
    said = (Message("user", "hello"), Message("assistant", "hi"))
    ours = Document("ours", "chat", text="User: hello\n\nAssistant: hi\n", messages=said)
    text, chat = tokenize(SimpleNamespace(url="u"), "m", [Document("t", "prose", text="abc"), ours])
    assert (text.plain, chat.plain) == ("", "no endpoint tells its chat template")
    assert len(chat.ids) == len(ours.text) and not chat.scored
    with pytest.raises(EndpointError, match="theirs is a chat, whose template no endpoint tells: give --tokenizer"):
        tokenize(SimpleNamespace(url="u"), "m", [Document("theirs", "chat", messages=said)])
