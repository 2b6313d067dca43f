"""How a failure is reported: one sentence on standard error, a document with --json, and the exit code."""

from __future__ import annotations

import errno
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from evalgate.cli.command import Invocation
from evalgate.cli.defaults import Setting
from evalgate.cli.streams import say
from evalgate.errors import CANNOT_MEASURE, EvalgateError, InputError, Interrupted, choose, closest
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

    def beside(self, settings: Mapping[str, Setting]) -> Failure:
        """The same; a mistake in the command line also names the options that were not typed but set elsewhere."""
        if self.type != "UsageError" or not settings:
            return self
        names: dict[str, list[str]] = {}
        for name, setting in settings.items():
            names.setdefault(setting.origin, []).append(name)
        said = [f"{origin} sets {', '.join(found)}" for origin, found in names.items()]
        return replace(self, message=_one_line(f"{self.message} ({'; '.join(said)})"))

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
    option = getattr(error, "param", None)  # the one that Typer refused
    settings = {k: v for k, v in invocation.settings.items() if option is None or k in option.opts}
    failure = failure_of(error).beside(settings)
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
    command = context.command_path if context else "evalgate"
    if context is not None and hasattr(error, "possibilities"):
        message = _unknown_option(str(getattr(error, "option_name", "")), context.command)
        return Failure.of_usage(message, help_command=command)
    return Failure.of_usage(_plainly(error) or format_message(), help_command=command)


# What pydantic says of a value, and what a person would.
_SAID = (
    (re.compile(r"Input should be a valid integer.*"), "should be a whole number"),
    (re.compile(r"Input should be a valid number.*"), "should be a number"),
    (re.compile(r"Input should be greater than or equal to (\S+)"), r"should be \1 or more"),
    (re.compile(r"Input should be less than or equal to (\S+)"), r"should be \1 or less"),
)
_CHOICE = re.compile(r"'(.*)' is not one of ", re.DOTALL)


def _plainly(error: BaseException) -> str:
    """What is wrong with a value or a missing one in plain words; "" where Typer's own will do."""
    option, message = (
        getattr(error, "param", None),
        str(getattr(error, "message", "")).removeprefix("Value error, ").rstrip("."),
    )
    typed = getattr(error, "option_name", "")
    if typed and "requires an argument" in message:
        return f"{typed} needs a value: write one after it"
    if typed and "does not take a value" in message:
        return f"{typed} takes no value: write it alone"
    if option is None:
        return ""
    argument = option.param_type_name == "argument"
    name = str(option.metavar or option.name) if argument else option.opts[0]
    if type(error).__name__ == "MissingParameter":
        return (
            f"{name} is missing: name it after the command"
            if argument
            else f"{name} is missing: give {name} {option.metavar}"
        )
    chosen = _CHOICE.match(message)
    known = getattr(getattr(option, "type_descriptor", None), "choices", None)
    if chosen and known:
        return (
            f"{name} cannot be {chosen[1]!r}: {choose(chosen[1], [str(getattr(one, 'value', one)) for one in known])}"
        )
    for pattern, words in _SAID:
        if pattern.fullmatch(message):
            return f"{name} {pattern.sub(words, message)}"
    return ""


def _unknown_option(name: str, command: Any) -> str:
    """What is wrong with an option that the command does not have."""
    close = closest(name, _options(command))
    if close is not None:
        return f"there is no option {name}: did you mean {close}?"
    after = [word for word, one in getattr(command, "commands", {}).items() if name in _options(one)]
    if after:
        return f"the option {name} stands after its command: write evalgate {after[0]} {name}"
    return f"there is no option {name}"


def _options(command: Any) -> list[str]:
    return [name for p in command.params if p.param_type_name == "option" for name in (*p.opts, *p.secondary_opts)]


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
