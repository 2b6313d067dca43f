"""How a failure is reported: one sentence on standard error, a document with --json, and the exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evalgate.cli.command import Invocation
from evalgate.errors import CANNOT_MEASURE, EvalgateError, InputError
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


def report_failure(invocation: Invocation, error: BaseException, failure: Failure) -> int:
    """Report on standard error, and with --json on standard output too; returns the exit code."""
    if invocation.debug:
        traceback.print_exception(error, file=sys.stderr)
    sys.stderr.write(f"evalgate: {failure.message}\n")
    if invocation.json:
        try:
            invocation.output.write(dump({"error": failure.document()}, name="error"))
        except InputError as unwritten:
            if unwritten.message != failure.message:
                sys.stderr.write(f"evalgate: {unwritten.message}\n")
    return failure.exit_code


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
    return " ".join(text.split())
