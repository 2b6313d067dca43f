"""The command tree and its outermost edge: signals, exit codes, no traceback.

Exit codes: 0 pass (measured), 1 fail, 2 cannot measure (usage included), 3 undecided, 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Annotated

import typer

from evalgate.cli import compare, gate, measure, plan, policy, probe, record, serve, slices, stored, trace, verify
from evalgate.cli.forgiving import forgive_stderr
from evalgate.cli.session import Failure, Session
from evalgate.cli.stdout import Output, ProcessOutput
from evalgate.errors import CANNOT_MEASURE, INTERRUPTED, PASS, EvalgateError, InputError, Interrupted

app = typer.Typer(
    name="evalgate",
    help="Does a candidate still behave like its reference? KL, agreement and perplexity with honest intervals.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command("kl")(measure.comparison("kl", "KL divergence of candidates from a reference, with intervals."))
app.command("agree")(
    measure.comparison("agree", "How often candidates pick the reference's token, and what a miss costs.")
)
app.command("ppl")(measure.ppl)
app.command("gate")(gate.gate)
app.add_typer(policy.app)
app.command("plan")(plan.plan)
app.command("slices")(slices.slices)
app.command("compare")(compare.compare)
app.command("probe")(probe.probe)
app.command("serve")(serve.serve)
app.command("verify")(verify.verify)
app.command("record")(record.record)
app.add_typer(trace.app)
app.command("show")(stored.show)
app.command("schema")(stored.schema)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"evalgate {version('evalgate')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options that stand before the command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own arguments); gives the exit code.

    SIGTERM stops a run as Ctrl-C does. Standard output stays guarded and standard error forgiving afterwards: the
    process should end.
    """
    signal.signal(signal.SIGTERM, _stop)
    forgive_stderr()
    code = invoke(list(sys.argv[1:] if argv is None else argv), ProcessOutput())
    return _flushed(code)


def invoke(args: Sequence[str], output: Output) -> int:
    """Run one command line against an output; every exception becomes a sentence and an exit code."""
    session = Session.of(args, output)
    try:
        code = app(list(args) or ["--help"], prog_name="evalgate", standalone_mode=False, obj=session)
    except EvalgateError as error:
        return session.fail(error, Failure.of(error))
    except KeyboardInterrupt as error:
        return _interrupted(session, error)
    except SystemExit as error:  # Typer's completion commands, and a help text whose reader went away
        gone = bool(args) and _reader_gone(error)
        return PASS if gone or error.code in (None, 0) else CANNOT_MEASURE
    except Exception as error:
        return session.fail(error, _usage_failure(error) or _no_room(error) or Failure.of_bug(error))
    if code == INTERRUPTED:  # Typer turns a KeyboardInterrupt into this exit code
        return _interrupted(session, KeyboardInterrupt())
    if not args:
        return CANNOT_MEASURE
    return code if isinstance(code, int) else PASS


def _reader_gone(error: SystemExit) -> bool:
    """Whether a help text ended early for its reader closed the pipe, which is no failure of any command."""
    cause = error.__cause__ or error.__context__
    return isinstance(cause, OSError) and cause.errno == errno.EPIPE


def _interrupted(session: Session, error: BaseException) -> int:
    return session.fail(error, Failure.of(Interrupted("stopped before anything was measured")))


def _usage_failure(error: Exception) -> Failure | None:
    """The failure of a command line that Typer refused, None for any other exception.

    Typer's own Click and the separate one share no base class, but both format their message.
    """
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        return None
    context = getattr(error, "ctx", None)
    return Failure.of_usage(format_message(), help_command=context.command_path if context else "evalgate")


def _no_room(error: Exception) -> Failure | None:
    """The failure of a full disk that nothing nearer told of (under Typer's help text), None for other exceptions."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    place = f" {error.filename}" if error.filename else ""
    return Failure.of(InputError(f"cannot write{place} ({error.strerror}): make room"))


def _stop(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _flushed(code: int) -> int:
    """Flush the standard streams; one that cannot be written is pointed at nothing, so that exit stays quiet."""
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
