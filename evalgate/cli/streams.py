"""The two standard streams: output that holds only what the command prints, and error output that never fails.

Libraries, C code and child processes write to file descriptor 1 as they please. Once guarded, descriptor 1 is a copy
of descriptor 2 (standard error) for the rest of the process, and the command alone holds the original, under a
number that no child inherits. Standard error is best effort: a reader that went away, a full disk under a log file or
a closed descriptor must neither end a measurement nor change its exit code.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, Protocol, TextIO

from evalgate.cli import colors
from evalgate.errors import InputError, UsageError
from evalgate.printable import printable, printable_styled

PLAIN_WIDTH, MIN_WIDTH, MAX_WIDTH = 80, 60, 120


class Output(Protocol):
    """Where a command's document goes."""

    @property
    def width(self) -> int:
        """Columns of a report."""

    @property
    def color(self) -> bool:
        """Whether the report may hold escape sequences."""

    def guard(self) -> None:
        """Let nothing but `write` reach the output from here on."""

    def write(self, text: str) -> None:
        """Write all of the text, control characters escaped; a reader that went away is not an error."""

    def write_styled(self, text: str) -> None:
        """The same for a report with escape sequences of its own, for an output with `color`."""


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
        """Columns: the terminal's within [60, 120], or 80 where the output is not a terminal."""
        if not self._terminal:
            return PLAIN_WIDTH
        return min(max(os.get_terminal_size(self._fd).columns, MIN_WIDTH), MAX_WIDTH)

    @property
    def color(self) -> bool:
        """Whether the report is colored (evalgate.cli.colors)."""
        return colors.wanted(terminal=self._terminal)

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
        sys.stdout = best_effort(1, like=sys.stdout)
        self._guarded = True

    def write(self, text: str) -> None:
        """UTF-8 on the original standard output; returns early where its reader closed the pipe.

        Raises InputError where it cannot be written, a full disk for one.
        """
        self._write(printable(text, lines=True))

    def write_styled(self, text: str) -> None:
        """The same with the text's own colors."""
        self._write(printable_styled(text))

    def _write(self, text: str) -> None:
        left = memoryview(text.encode("utf-8", "backslashreplace"))
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BrokenPipeError:
                return
            except OSError as error:
                raise InputError(f"cannot write to standard output ({error.strerror or error}): make room") from error


def say(text: str) -> None:
    """One line on standard error, control characters escaped."""
    sys.stderr.write(f"{printable(text)}\n")


def make_stderr_best_effort() -> None:
    """Make sys.stderr drop what it cannot write instead of raising.

    A closed descriptor 2 is pointed at /dev/null, so that no file opened later gets its number.
    """
    if not is_open(2):
        sink = os.open(os.devnull, os.O_WRONLY)
        if sink != 2:
            os.dup2(sink, 2)
            os.close(sink)
    sys.stderr = best_effort(2, like=sys.stderr)


def best_effort(fd: int, *, like: TextIO | None) -> TextIO:
    """A text stream on the descriptor that never fails to write, encoded as `like` is."""
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
