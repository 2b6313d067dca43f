"""A server that is stopped (SIGSTOP) ends with a sentence; one that only computes long does not."""

import socket
import threading
import time

import pytest

from evalgate.errors import ServerError
from evalgate.server.client import EmbeddedClient
from evalgate.server.heartbeat import Heartbeat


class Silent:
    """Takes connections and never answers, as a stopped process does; ends like an EmbeddedServer."""

    key = "k"

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._peers, self.stopped = [], threading.Event()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        try:
            while True:
                self._peers.append(self._listener.accept()[0])
        except OSError:
            return

    def stop(self):
        self.stopped.set()
        self._listener.close()
        for peer in self._peers:
            peer.shutdown(socket.SHUT_RDWR)
            peer.close()

    def failure(self, what):
        return ServerError(f"the embedded server gave no answer ({what})")


def test_a_stopped_server_ends_the_request_that_waits_for_it():
    server = Silent()
    client = EmbeddedClient(server, silence=0.5, beat=0.1)
    with pytest.raises(ServerError, match=r"has not answered for 0\.5 seconds, not even whether it is well"):
        client.versions()
    assert server.stopped.is_set()
    client.close()


def test_a_server_that_says_it_is_well_may_take_its_time():
    lost, asked = threading.Event(), threading.Event()
    beats = iter(range(10**6))

    def alive():
        if next(beats) > 20:
            asked.set()
        return True

    beat = Heartbeat(alive, lost.set, silence=0.0, beat=0.001)
    with beat.request():
        assert asked.wait(60)
    beat.close()
    assert not lost.is_set() and not beat.hung


def test_nothing_is_asked_while_no_request_waits():
    asked = []
    beat = Heartbeat(lambda: asked.append(1) is None, lambda: None, beat=0.001)
    with beat.request():
        while not asked:
            time.sleep(0.001)
    time.sleep(0.05)
    count = len(asked)
    time.sleep(0.05)
    assert len(asked) <= count + 1
    beat.close()
