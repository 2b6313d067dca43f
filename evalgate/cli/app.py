"""The command tree and its outermost edge: signals, exit codes, no traceback.

Exit codes: 0 pass (measured), 1 fail, 2 cannot measure (usage included), 3 undecided, 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Annotated

import typer

from evalgate.cli import (
    cache,
    colors,
    compare,
    config,
    diff,
    doctor,
    gate,
    help,
    measure,
    plan,
    policy,
    probe,
    record,
    serve,
    show,
    slices,
    sweep,
    trace,
    verify,
    view,
)
from evalgate.cli.command import Invocation, command
from evalgate.cli.examples import epilog
from evalgate.cli.failures import Documented, report_failure
from evalgate.cli.streams import Output, ProcessOutput, make_stderr_best_effort
from evalgate.core import VERSION
from evalgate.errors import CANNOT_MEASURE, INTERRUPTED, PASS

app = typer.Typer(
    name="evalgate",
    help="Does a candidate still behave like its reference? KL, agreement and perplexity with honest intervals.",
    context_settings=help.SETTINGS,
    cls=help.Group,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
_COMMANDS: dict[str, Callable[..., int | None]] = {
    "kl": measure.comparison("kl", "KL divergence of candidates from a reference, with intervals."),
    "agree": measure.comparison("agree", "How often candidates pick the reference's token, and what a miss costs."),
    "ppl": measure.ppl,
    "sweep": sweep.sweep,
    "gate": gate.gate,
    "plan": plan.plan,
    "slices": slices.slices,
    "compare": compare.compare,
    "diff": diff.diff,
    "probe": probe.probe,
    "serve": serve.serve,
    "verify": verify.verify,
    "record": record.record,
    "show": show.show,
    "view": view.view,
    "schema": show.schema,
    "config": config.config,
    "doctor": doctor.doctor,
}
# What a command leaves behind where its command line cannot be read.
_UNREAD: dict[str, Callable[[Sequence[str], BaseException], None]] = {"gate": gate.leave_unread}
# Commands that take options which are unknown here: those of `serve` are the server's own.
_PASSING_ON = {"serve": {"ignore_unknown_options": True}}
# Groups of the commands in the help.
_PANELS = {
    "Measure": ("kl", "agree", "ppl", "sweep", "record", "trace"),
    "Judge": ("gate", "plan", "policy"),
    "Look at runs": ("show", "view", "diff", "slices", "compare"),
    "Endpoints and servers": ("probe", "verify", "serve"),
    "This machine": ("doctor", "config", "cache", "schema"),
}
_PANEL = {name: panel for panel, names in _PANELS.items() for name in names}
for _name, _function in _COMMANDS.items():
    app.command(
        _name,
        cls=help.Command,
        epilog=epilog(_name),
        rich_help_panel=_PANEL.get(_name),
        context_settings=_PASSING_ON.get(_name),
    )(command(_function))
app.add_typer(policy.app, rich_help_panel=_PANEL["policy"])
app.add_typer(trace.app, rich_help_panel=_PANEL["trace"])
app.add_typer(cache.app, rich_help_panel=_PANEL["cache"])


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"evalgate {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own arguments) and return the exit code.

    SIGTERM stops a run as Ctrl-C does. Standard output stays guarded afterwards and standard error best effort, so the
    process should end.
    """
    signal.signal(signal.SIGTERM, _stop)
    make_stderr_best_effort()
    args = list(sys.argv[1:] if argv is None else argv)
    colors.apply(args)
    code = invoke(args, ProcessOutput())
    return _flushed(code)


def invoke(args: Sequence[str], output: Output) -> int:
    """Run one command line against an output; every exception becomes a sentence and an exit code."""
    invocation = Invocation.of(args, output)
    try:
        code = app(list(args) or ["--help"], prog_name="evalgate", standalone_mode=False, obj=invocation)
    except SystemExit as error:  # Typer's completion commands, and a help text whose reader went away
        gone = bool(args) and _reader_gone(error)
        return PASS if gone or error.code in (None, 0) else CANNOT_MEASURE
    except (Exception, KeyboardInterrupt) as error:
        leave = _UNREAD.get(args[0]) if args else None
        if leave is not None and not isinstance(error, Documented):
            leave(args, error)
        return report_failure(invocation, error)
    if code == INTERRUPTED:  # Typer turns a KeyboardInterrupt into this exit code
        return report_failure(invocation, KeyboardInterrupt())
    if not args:
        return CANNOT_MEASURE
    return code if isinstance(code, int) else PASS


def _reader_gone(error: SystemExit) -> bool:
    """Whether a help text ended early because its reader closed the pipe, which is not a failure."""
    cause = error.__cause__ or error.__context__
    return isinstance(cause, OSError) and cause.errno == errno.EPIPE


def _stop(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _flushed(code: int) -> int:
    """Flush the standard streams; one that cannot be written is pointed at /dev/null, so that exit stays quiet."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, stream.fileno())
            os.close(sink)
    return code
