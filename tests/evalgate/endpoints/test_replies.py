"""Replies without an end: what is read is counted as it is decoded."""

import gzip
import itertools
import os
import resource
import zlib

import pytest

from evalgate.dialects.base import Request
from evalgate.endpoints import replies
from evalgate.endpoints.channel import Channel
from evalgate.endpoints.replies import BodyError, Room
from evalgate.endpoints.settings import EndpointSettings
from evalgate.errors import EndpointError
from tests.evalgate.endpoints.test_channel import raw_server

ASK = Request("POST", "/v1/completions", {"prompt": [1]})
TEXT = b'{"ok": "' + os.urandom(5000).hex().encode() + b'"}'


def read(raw, encoding=""):
    with Room().body() as body:
        for chunk in body.decoded(iter(raw), encoding):
            body.add(chunk)
        return body.whole()


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [("", TEXT), ("identity", TEXT), ("gzip", gzip.compress(TEXT)), ("deflate", zlib.compress(TEXT))],
)
def test_bodies_are_decoded(encoding, packed):
    pieces = [packed[i : i + 100] for i in range(0, len(packed), 100)]
    assert read(pieces, encoding) == TEXT


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "zstd"])
def test_an_encoding_that_was_not_asked_for_is_refused(encoding):
    with pytest.raises(BodyError, match="not asked for"):
        read([b"x"], encoding)


def test_what_is_not_what_it_says_is_refused():
    with pytest.raises(BodyError, match="not the gzip"):
        read([b"plain text"], "gzip")


def test_a_bomb_is_cut_off_piece_by_piece(monkeypatch):
    monkeypatch.setattr(replies, "MOST_OF_ONE", 8 << 20)
    bomb = gzip.compress(bytes(200 << 20))
    assert len(bomb) < 1 << 18
    seen = []
    with pytest.raises(BodyError, match="longer than 8 MiB"), Room().body() as body:
        for chunk in body.decoded(iter([bomb]), "gzip"):
            seen.append(len(chunk))
            body.add(chunk)
    assert max(seen) <= 1 << 20 and sum(seen) <= 9 << 20


def test_replies_under_way_share_the_room(monkeypatch):
    monkeypatch.setattr(replies, "MOST_OF_ALL", 100)
    room = Room()
    with room.body() as one:
        one.add(bytes(60))
        with pytest.raises(BodyError, match="together"), room.body() as other:
            other.add(bytes(60))
        with room.body() as small:
            small.add(bytes(40))
    with room.body() as alone:
        alone.add(bytes(100))


def test_the_client_survives_a_bomb_and_an_endless_body(monkeypatch):
    monkeypatch.setattr(replies, "MOST_OF_ONE", 4 << 20)
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
    bomb = head + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(bytes(100 << 20))

    def endless(peer):
        peer.sendall(head + b"\r\n")
        try:
            for _ in itertools.count():
                peer.sendall(bytes(1 << 16))
        except OSError:
            return

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for answer in (bomb, endless):
        with raw_server(answer) as (url, _):
            client = Channel(url, EndpointSettings(patience=0.2, timeout=60), key=None)
            with pytest.raises(EndpointError, match="longer than 4 MiB: ask for a smaller --top-k or --context"):
                client.send(ASK)
            client.close()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10  # KiB
