"""Streams that never fail: what is told on them is a courtesy, the exit code is the answer.

Progress whose reader went away, a full disk under a log file or a closed descriptor must neither end a measurement
nor turn its exit code into another one.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


def forgive_stderr() -> None:
    """From here on sys.stderr takes every text, and drops what cannot be written.

    A closed descriptor 2 is pointed at nothing, so that no file which is opened later gets its number.
    """
    if not is_open(2):
        sink = os.open(os.devnull, os.O_WRONLY)
        if sink != 2:
            os.dup2(sink, 2)
            os.close(sink)
    sys.stderr = forgiving(2, like=sys.stderr)


def forgiving(fd: int, *, like: TextIO | None) -> TextIO:
    """A text stream on the descriptor, encoded as `like` is, whose writes cannot fail."""
    return io.TextIOWrapper(
        io.BufferedWriter(_Descriptor(fd, "w", closefd=False)),
        encoding=like.encoding if like else "utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )


def is_open(fd: int) -> bool:
    """Whether the process has this descriptor."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


class _Descriptor(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)
