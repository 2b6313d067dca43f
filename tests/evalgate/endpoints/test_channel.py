"""The client: limits that adapt, failures that pass, secrets that stay."""

import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from evalgate.dialects.base import Request
from evalgate.endpoints.budget import Budget, Purse, Spending, Spent
from evalgate.endpoints.channel import Channel, EndpointDown, retry_after
from evalgate.endpoints.limiter import Limiter
from evalgate.endpoints.settings import EndpointSettings
from evalgate.errors import UsageError
from tests.evalgate.fake_endpoint import MODEL, Fake, serving
from tests.stuck import STUCK

ASK = Request("POST", "/v1/completions", {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1, "logprobs": 2})


@contextmanager
def channel(url, **options):
    found = Channel(url, EndpointSettings(**{"patience": STUCK, "concurrency": 4, **options}), key="k3y")
    try:
        yield found
    finally:
        found.close()


@contextmanager
def raw_server(*answers):
    """Sends each connection one of the answers (bytes, or a callable on the socket) and closes it."""
    listener = socket.create_server(("127.0.0.1", 0))
    seen = []

    def loop():
        for answer in answers:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                seen.append(peer.recv(65536))
                if callable(answer):
                    answer(peer)
                else:
                    peer.sendall(answer)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
    finally:
        listener.close()


def http(body, status="200 OK", extra=""):
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{extra}\r\n{body}".encode()


def test_a_storm_of_429_is_weathered():
    fake = Fake()
    fake.overload = ["0"] * 12
    with serving(fake), channel(fake.url, concurrency=8) as client:
        replies = client.send_all([ASK] * 12)
        assert [r.status for r in replies] == [200] * 12
        assert client.overloads == 12
        assert client.asked == 12
        assert client.limiter.size < 8
        assert client.longest_hold == 0.0


def test_every_try_is_paid_for_but_not_one_that_nobody_heard():
    fake, spending = Fake(), Spending(Budget(requests=3))
    fake.overload = ["0", "0"]
    with serving(fake), channel(fake.url) as client:
        assert client.send(ASK, Purse(spending, 0)).status == 200
        assert spending.requests == 3
        with pytest.raises(Spent):
            client.send_all([ASK] * 2, Purse(spending, 0))
        assert len(fake.headers) == 3
    spending = Spending(Budget(requests=3))
    with channel(fake.url, patience=0.3) as client, pytest.raises(EndpointDown):
        client.send(ASK, purse := Purse(spending, 0))
    purse.close()
    assert spending.requests == 0


def test_retry_after_is_waited_for():
    fake = Fake()
    fake.overload = ["0.4"]
    with serving(fake), channel(fake.url) as client:
        began = time.monotonic()
        assert client.send(ASK).status == 200
        assert time.monotonic() - began >= 0.4


def test_an_endless_overload_ends_with_the_patience():
    fake = Fake()
    fake.overload = ["0.05"] * 1000
    with serving(fake), channel(fake.url, patience=0.3) as client, pytest.raises(EndpointDown, match="status 429"):
        client.send(ASK)


def test_a_refusal_is_an_answer_and_not_repeated():
    with serving(Fake()) as fake, channel(fake.url) as client:
        reply = client.send(Request("POST", "/generate", {"x": 1}))
        assert reply.status == 404
        assert client.asked == 1


def test_a_cut_reply_is_asked_again():
    whole = http(json.dumps({"ok": 1}))
    with raw_server(whole[:-4], whole) as (url, seen), channel(url) as client:
        assert json.loads(client.send(ASK).body) == {"ok": 1}
        assert len(seen) == 2


def test_a_reply_that_drips_is_cut_off():
    def drip(peer):
        peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while True:
            time.sleep(0.05)
            try:
                peer.sendall(b"x")
            except OSError:
                return

    whole = [http("{}")] * 100  # a loaded machine may be late with some of them too
    with raw_server(drip, *whole) as (url, _), channel(url, timeout=0.4, patience=STUCK) as client:
        assert client.send(ASK).body == b"{}"


def test_nobody_there():
    with channel("http://127.0.0.1:9", patience=0.1) as client, pytest.raises(EndpointDown, match="is it running"):
        client.send(ASK)


def test_replies_keep_the_order_of_requests():
    with serving(Fake()) as fake, channel(fake.url) as client:
        asks = [
            Request("POST", "/v1/completions", {"prompt": [n], "logprobs": 1, "return_token_ids": True})
            for n in range(40)
        ]
        got = [json.loads(r.body)["choices"][0]["prompt_token_ids"] for r in client.send_all(asks)]
        assert got == [[n] for n in range(40)]


def test_connections_are_reused():
    with serving(Fake()) as fake, channel(fake.url, concurrency=1) as client:
        for _ in range(5):
            client.send(ASK)
        assert len(fake.headers) == 5
        assert all(h["connection"] == "keep-alive" for h in fake.headers)


def test_the_limit_halves_once_a_round_and_grows_again():
    now = [0.0]
    limiter = Limiter(16, clock=lambda: now[0])
    with limiter.slot() as one, limiter.slot() as two:
        limiter.overloaded(one, hold=None)
        limiter.overloaded(two, hold=None)
    assert limiter.size == 8
    with limiter.slot() as again:
        limiter.overloaded(again, hold=None)
    assert limiter.size == 4
    for _ in range(200):
        limiter.answered()
    assert limiter.size == 16
    for _ in range(10):
        with limiter.slot() as began:
            limiter.overloaded(began, hold=None)
    assert limiter.size == 1


def test_never_more_under_way_than_the_limit():
    limiter, under_way, most = Limiter(3), 0, 0
    lock = threading.Lock()

    def work():
        nonlocal under_way, most
        with limiter.slot():
            with lock:
                under_way += 1
                most = max(most, under_way)
            time.sleep(0.005)
            with lock:
                under_way -= 1

    threads = [threading.Thread(target=work) for _ in range(20)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert most == 3


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), ("5", 5.0), ("0.5", 0.5), ("-3", 0.0), ("1e9", 120.0), ("soon", None), ("nan", None)],
)
def test_retry_after_values(value, seconds):
    assert retry_after(value) == seconds


def test_retry_after_dates():
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert retry_after("Wed, 21 Oct 2999 07:28:00 GMT") == 120.0


def test_keys_come_from_where_they_are_said_to(tmp_path, monkeypatch):
    monkeypatch.delenv("EVALGATE_ENDPOINT_KEY", raising=False)
    assert EndpointSettings().key() is None
    monkeypatch.setenv("EVALGATE_ENDPOINT_KEY", "default")
    assert EndpointSettings().key() == "default"
    monkeypatch.setenv("OTHER", " spaced \n")
    assert EndpointSettings(key_variable="OTHER").key() == "spaced"
    (tmp_path / "key").write_text("from-file\n")
    assert EndpointSettings(key_file=str(tmp_path / "key")).key() == "from-file"


@pytest.mark.parametrize("content", ["", "  \n", "two words", "line\nbreak", "ünicode"])
def test_broken_keys_are_refused_without_showing_them(tmp_path, content):
    (tmp_path / "key").write_text(content)
    with pytest.raises(UsageError) as caught:
        EndpointSettings(key_file=str(tmp_path / "key")).key()
    assert not content.strip() or content.strip() not in caught.value.message
    with pytest.raises(UsageError, match="cannot be read"):
        EndpointSettings(key_file=str(tmp_path / "none")).key()
    with pytest.raises(UsageError, match="NOT_SET"):
        EndpointSettings(key_variable="NOT_SET").key()


def test_certificates_and_proxies_that_cannot_be_used(tmp_path):
    (tmp_path / "ca.pem").write_text("nonsense")
    for options in ({"ca_file": str(tmp_path / "ca.pem")}, {"ca_file": "none.pem"}, {"proxy": "nonsense://x"}):
        with pytest.raises(UsageError), channel("http://127.0.0.1:9", **options):
            pass


def test_requests_go_through_the_proxy():
    with raw_server(http('{"via": "proxy"}')) as (proxy, seen), channel("http://far.invalid", proxy=proxy) as client:
        assert json.loads(client.send(ASK).body) == {"via": "proxy"}
        assert seen[0].startswith(b"POST http://far.invalid/v1/completions ")


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 520, 529])
def test_statuses_that_pass_are_tried_again(status):
    with raw_server(http("{}", f"{status} Passing"), http('{"ok": 1}')) as (url, seen), channel(url) as client:
        assert json.loads(client.send(ASK).body) == {"ok": 1}
        assert len(seen) == 2


@pytest.mark.parametrize(
    ("error", "again"),
    [
        ({"code": 429, "message": "upstream is busy"}, True),
        ({"code": "503", "message": "upstream is busy"}, True),
        ({"status": 529, "message": "upstream is busy"}, True),
        ({"code": 400, "message": "upstream says no"}, False),
        ({"code": "model_not_found", "message": "no"}, False),
    ],
)
def test_an_error_inside_a_200_counts_by_its_own_code(error, again):
    inside = http(json.dumps({"error": error}))
    with raw_server(inside, http('{"ok": 1}')) as (url, seen), channel(url) as client:
        body = json.loads(client.send(ASK).body)
    assert (body == {"ok": 1}, len(seen)) == (again, 1 + again)


def test_an_endless_500_is_believed_in_the_end():
    """It may be the answer to this very request, so that its text is worth reading."""
    broken = http('{"error": {"message": "no such field"}}', "500 Internal Server Error")
    with raw_server(*[broken] * 9) as (url, seen), channel(url, patience=30.0) as client:
        assert client.send(ASK).status == 500
        assert len(seen) == 3


@pytest.mark.parametrize("value", ["Wed, 21 Oct 99999 07:28:00 GMT", "Fri, 31 Dec 9999 23:59:59 -2359", "1e400"])
def test_a_retry_after_that_no_calendar_has(value):
    assert retry_after(value) in (None, 120.0)


def test_a_retry_after_is_no_longer_than_the_patience():
    naps = []
    with raw_server(*[http("{}", "429 Slow", "Retry-After: 99999999\r\n")] * 9) as (url, seen):
        with channel(url, patience=0.3) as client, pytest.raises(EndpointDown, match=r"0\.3 seconds \(status 429\)"):
            wait = client._closed.wait
            client._closed.wait = lambda seconds: naps.append(seconds) or wait(seconds)
            client.send(ASK)
        assert len(seen) == 2
    assert naps and max(naps) <= 0.3


def test_a_connection_that_is_lost_late_is_tried_again():
    """Patience counts from the first failure: how long the request took before does not matter."""

    def late(peer):
        time.sleep(0.5)

    with raw_server(late, http('{"ok": 1}')) as (url, _), channel(url, patience=0.2) as client:
        assert json.loads(client.send(ASK).body) == {"ok": 1}


def test_an_idle_connection_is_not_trusted_for_long():
    with channel("http://127.0.0.1:9") as client:
        assert client._http._transport._pool._keepalive_expiry < 5  # uvicorn closes idle ones after 5 seconds
