"""Bodies of replies, with an end: decoded bytes are counted, so that no server can fill the memory."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

MOST_OF_ONE = 256 << 20  # bytes, decoded: 4,096 positions with 1,000 alternatives
MOST_OF_ALL = 384 << 20  # of all replies that one channel reads at once
_PIECE = 1 << 20  # decoded at a time


class BodyError(Exception):
    """A body that is too large, or encoded in a way that was not asked for."""


class Body:
    """One reply's body while it is read."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._chunks: list[bytes] = []
        self.size = 0

    def decoded(self, raw: Iterator[bytes], encoding: str) -> Iterator[bytes]:
        """The decoded pieces of a body, none of them large: a compressed one may be a thousand times as long."""
        name = encoding.strip().lower()
        if name in ("", "identity"):
            yield from raw
            return
        if name not in ("gzip", "x-gzip", "deflate"):
            raise BodyError(f"the reply is encoded as '{name[:40]}', which was not asked for")
        unpack = zlib.decompressobj(zlib.MAX_WBITS | 32)  # 32: tells gzip from zlib by itself
        try:
            for chunk in raw:
                yield unpack.decompress(chunk, _PIECE)
                while unpack.unconsumed_tail:
                    yield unpack.decompress(unpack.unconsumed_tail, _PIECE)
            yield unpack.flush()
        except zlib.error as error:
            raise BodyError(f"the reply is not the {name} that it says it is ({error})") from None

    def add(self, chunk: bytes) -> None:
        """Keep a piece. Raises BodyError where the body, or all that are being read, become too large."""
        self.size += len(chunk)
        self._room.take(len(chunk))
        self._chunks.append(chunk)
        if self.size > MOST_OF_ONE:
            raise BodyError(f"the reply is longer than {MOST_OF_ONE >> 20} MiB: ask for a smaller --top-k or --context")

    def whole(self) -> bytes:
        """All pieces."""
        return b"".join(self._chunks)


class Room:
    """Memory for the bodies that are being read at once; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = 0

    def take(self, size: int) -> None:
        """Count bytes. Raises BodyError where there is no room for them."""
        with self._lock:
            self._taken += size
            if self._taken > MOST_OF_ALL:
                raise BodyError(
                    f"the replies under way are longer than {MOST_OF_ALL >> 20} MiB together: ask for a smaller "
                    "--concurrency, --top-k or --context"
                )

    @contextmanager
    def body(self) -> Iterator[Body]:
        """A body, whose room is free again afterwards."""
        body = Body(self)
        try:
            yield body
        finally:
            with self._lock:
                self._taken -= body.size
