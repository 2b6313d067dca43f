"""Standard output that holds only what the command prints.

Libraries, C code and child processes write to file descriptor 1 as they please. Once guarded, descriptor 1
is a copy of descriptor 2 (standard error) for the rest of the process, and the command alone holds the
original, under a number that no child inherits.
"""

from __future__ import annotations

import os
import sys
from typing import Protocol

from evalgate.cli.forgiving import forgiving, is_open
from evalgate.errors import InputError, UsageError

PLAIN_WIDTH, MIN_WIDTH, MAX_WIDTH = 80, 60, 120


class Output(Protocol):
    """Where a command's document goes."""

    @property
    def width(self) -> int:
        """Columns of a report."""

    @property
    def color(self) -> bool:
        """Whether escape sequences are welcome."""

    def guard(self) -> None:
        """From here on nothing but `write` reaches the output."""

    def write(self, text: str) -> None:
        """Write all of the text; a reader that went away is no error."""


class ProcessOutput:
    """The process's own standard output."""

    def __init__(self) -> None:
        self._fd = 1
        self._guarded = False

    @property
    def _terminal(self) -> bool:
        return os.isatty(self._fd)

    @property
    def width(self) -> int:
        """Columns: the terminal's within [60, 120], or 80 where the output is no terminal."""
        if not self._terminal:
            return PLAIN_WIDTH
        return min(max(os.get_terminal_size(self._fd).columns, MIN_WIDTH), MAX_WIDTH)

    @property
    def color(self) -> bool:
        """True on a terminal that takes escapes and whose user did not set NO_COLOR."""
        return self._terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"

    def guard(self) -> None:
        """Keep the original descriptor 1 and point 1 at standard error. Idempotent.

        Raises UsageError where standard output is closed.
        """
        if self._guarded:
            return
        if sys.stdout is None or not is_open(1):
            raise UsageError("standard output is closed: leave it open, or send it to /dev/null")
        sys.stdout.flush()
        self._fd = os.dup(1)
        if is_open(2):
            os.dup2(2, 1)
        else:
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, 1)
            os.close(sink)
        sys.stdout = forgiving(1, like=sys.stdout)
        self._guarded = True

    def write(self, text: str) -> None:
        """UTF-8 on the original standard output; returns early where its reader closed the pipe.

        Raises InputError where it cannot be written, a full disk for one.
        """
        left = memoryview(text.encode("utf-8", "backslashreplace"))
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BrokenPipeError:
                return
            except OSError as error:
                raise InputError(f"cannot write to standard output ({error.strerror or error}): make room") from error
