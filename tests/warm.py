"""Servers that stay up between tests: a process that imports torch and loads a model costs more than most tests of it.

Only servers over the session's own checkpoints (`tests.checkpoints`) are kept, and over those in folders that a module
adds to `WarmServers.folders`, since nothing changes them; and only for tests that ask for the fixture `warm`. Start,
end and death are tested on servers of a test's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from evalgate.server.process import EmbeddedServer

KEPT = 2  # idle servers of one worker at most
_STATE = ("_process", "_log", "key", "port", "failed", "no_room")  # what makes the object that server


class WarmServers:
    """Idle servers by what they serve, the latest used last."""

    def __init__(self, folder: Path) -> None:
        self.folders = {str(folder)}
        self.idle: dict[tuple[str, ...], EmbeddedServer] = {}
        self.start, self.stop = EmbeddedServer.start, EmbeddedServer.stop

    def key(self, server: EmbeddedServer) -> tuple[str, ...] | None:
        """What a server serves and how; None where it is not to be kept."""
        own = all(spec.startswith(tuple(self.folders)) for spec in server._specs)
        return (server.module, *server._specs, *server._options) if own else None

    def begin(self, server: EmbeddedServer) -> None:
        """Take over an idle server that serves the same, or start one."""
        key = self.key(server)
        kept = self.idle.pop(key, None) if key else None
        if kept is not None and kept._process is not None and kept._process.poll() is None:
            for name in _STATE:
                setattr(server, name, getattr(kept, name))
        else:
            self.start(server)

    def end(self, server: EmbeddedServer) -> None:
        """Keep a server that lives; stop what is one too many."""
        key = self.key(server)
        lives = server._process is not None and server._process.poll() is None and server.port > 0
        if key is None or key in self.idle or not lives:
            self.stop(server)
            return
        kept = EmbeddedServer(server._specs)
        for name in _STATE:
            setattr(kept, name, getattr(server, name))
        server._process = server._log = None
        self.idle[key] = kept
        while len(self.idle) > KEPT:
            self.stop(self.idle.pop(next(iter(self.idle))))

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Embedded servers inside the block come from here and go back to here."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EmbeddedServer, "start", lambda server: self.begin(server))
            patch.setattr(EmbeddedServer, "stop", lambda server: self.end(server))
            yield

    def close(self) -> None:
        """Stop every idle server."""
        for server in self.idle.values():
            self.stop(server)
