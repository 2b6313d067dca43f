"""How a failure is reported: one sentence on standard error, a document with --json, and the exit code."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evalgate.cli.command import Invocation
from evalgate.cli.streams import say
from evalgate.errors import CANNOT_MEASURE, EvalgateError, InputError, Interrupted
from evalgate.printable import printable
from evalgate.store.documents import dump


@dataclass(frozen=True)
class Failure:
    """An error as the user sees it: one sentence and an exit code."""

    type: str
    message: str
    exit_code: int
    context: Mapping[str, object]

    @classmethod
    def of(cls, error: EvalgateError) -> Failure:
        """An error of the error tree, with its context."""
        return cls(type(error).__name__, _one_line(error.message), error.exit_code, error.context)

    @classmethod
    def of_usage(cls, message: str, *, help_command: str) -> Failure:
        """A command line that Typer refused."""
        text = _one_line(message).rstrip(".").replace("Value error, ", "")
        return cls("UsageError", f"{text} (see {help_command} --help)", CANNOT_MEASURE, {})

    @classmethod
    def of_bug(cls, error: BaseException) -> Failure:
        """An exception that no code expected."""
        name = type(error).__name__
        cause = f"{name}: {_one_line(str(error))}" if str(error) else name
        message = f"evalgate failed unexpectedly: {cause}; run again with --debug and report it"
        return cls("UnexpectedError", message, CANNOT_MEASURE, {"exception": name})

    def document(self) -> dict[str, Any]:
        """The failure as JSON values; context that JSON cannot hold becomes text."""
        return {
            "type": self.type,
            "message": self.message,
            "exit_code": self.exit_code,
            "context": {key: _plain(value) for key, value in self.context.items()},
        }


def failure_of(error: BaseException) -> Failure:
    """The failure that any exception of a command is."""
    if isinstance(error, EvalgateError):
        return Failure.of(error)
    if isinstance(error, KeyboardInterrupt):
        return Failure.of(Interrupted("stopped before the command had finished: run it again"))
    return _usage_failure(error) or _no_room(error) or Failure.of_bug(error)


class Documented(Exception):
    """An error of a command that has a document all the same: what --json prints, with the key `error`."""

    def __init__(self, error: BaseException, document: Mapping[str, Any]) -> None:
        super().__init__(str(error))
        self.error = error
        self.document = document


def report_failure(invocation: Invocation, error: BaseException) -> int:
    """Report on standard error, and with --json on standard output too; returns the exit code."""
    documented = error if isinstance(error, Documented) else None
    document = None if documented is None else documented.document
    error = error if documented is None else documented.error
    failure = failure_of(error)
    if invocation.debug:
        sys.stderr.write(printable("".join(traceback.format_exception(error)), lines=True))
    say(f"evalgate: {failure.message}")
    if invocation.json:
        try:
            invocation.output.write(dump(document or {"error": failure.document()}, name="error"))
        except InputError as unwritten:
            if unwritten.message != failure.message:
                say(f"evalgate: {unwritten.message}")
    return failure.exit_code


def _usage_failure(error: BaseException) -> Failure | None:
    """The failure of a command line that Typer refused, None for any other exception.

    Typer's own Click and the separate one share no base class, but both format their message.
    """
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        return None
    context = getattr(error, "ctx", None)
    return Failure.of_usage(format_message(), help_command=context.command_path if context else "evalgate")


def _no_room(error: BaseException) -> Failure | None:
    """The failure of a full disk that no command reported (while Typer prints help), None for other exceptions."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    place = f" {error.filename}" if error.filename else ""
    return Failure.of(InputError(f"cannot write{place} ({error.strerror}): make room"))


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, float) and abs(value) < float("inf"):  # false for NaN too
        return value
    return str(value)


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))
