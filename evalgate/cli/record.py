"""`evalgate record`: keep what a reference says, for candidates measured later."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from evalgate.cli import options
from evalgate.cli.command import Invocation
from evalgate.cli.show import show_document
from evalgate.cli.streams import Output
from evalgate.core import counted
from evalgate.errors import Interrupted
from evalgate.store.remote import place

if TYPE_CHECKING:
    from evalgate.measure.record import Recording, RecordRequest


def record(
    call: Invocation,
    ref: options.Reference,
    out: Annotated[
        Any,
        typer.Option(
            metavar="PATH",
            parser=place,
            help="The trace folder, NAME.trace, or its URL, or the logits file of llama.cpp.",
        ),
    ],
    run: options.RunOptions,
    top_k: Annotated[int, typer.Option(min=2, metavar="K", help="Likeliest ids kept exactly per position.")] = 64,
    tail_samples: Annotated[
        int, typer.Option(min=2, metavar="M", help="Ids drawn from the rest per position, in proportion.")
    ] = 16,
    full: Annotated[bool, typer.Option("--full", help="Also keep whole float16 rows: large, exact.")] = False,
    hidden: Annotated[
        bool, typer.Option("--hidden", help="Keep hidden states and the output head: small, exact to the last bit.")
    ] = False,
    format: Annotated[
        Literal["trace", "llama.cpp"],
        typer.Option("--format", help="trace, or llama.cpp: a file for --kl-divergence-base."),
    ] = "trace",
    dry_run: options.DryRun = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Record a reference once, so that candidates can be compared with it without its weights."""
    from evalgate.measure.record import RecordRequest

    text = run.request("ppl", None, [ref])
    request = RecordRequest(text, out, top_k=top_k, tail_samples=tail_samples, full=full, hidden=hidden, format=format)
    if dry_run:
        from evalgate.measure.forecast import forecast_recording

        show_document(call.output, "forecast", forecast_recording(request), json=json)
        return
    _print(call.output, _recorded(request, quiet=quiet), json=json)


def _recorded(request: RecordRequest, *, quiet: bool) -> Recording:
    from evalgate.cli.progress import observer
    from evalgate.measure.record import record as make
    from evalgate.measure.request import silent

    watcher = silent() if quiet else observer(sys.stderr, noun="nll")
    try:
        return make(request, observer=watcher)
    except KeyboardInterrupt:
        again = "start again" if request.format == "llama.cpp" else "resume after the last windows it recorded"
        raise Interrupted(f"stopped: run the same command again to {again}") from None
    finally:
        watcher.finish()


def _head_bytes(made: Recording) -> int:
    """Bytes of the output head, which is there once and may be shared by other traces; 0 where there is none."""
    manifest = made.manifest
    return 0 if manifest is None or manifest.head is None else manifest.files[manifest.head].size


def _print(output: Output, made: Recording, *, json: bool) -> None:
    facts = {
        "path": str(made.out),
        "source": made.source.spec,
        "vocabulary": made.source.vocab_size,
        "windows": made.windows,
        "positions": made.positions,
        "bytes": made.bytes,
        "bytes_per_position": (made.bytes - _head_bytes(made)) / made.positions,
        "head_bytes": _head_bytes(made),
        "checksum": None if made.manifest is None else made.manifest.checksum,
    }
    if json:
        from evalgate.store.documents import dump

        output.write(dump(facts, name="recording"))
        return
    per = f"{made.bytes / made.positions:,.0f} bytes a position"
    head = _head_bytes(made)
    if head:
        per = f"{(made.bytes - head) / made.positions:,.0f} a position and an output head of {head:,}"
    output.write(
        f"{made.out}: {counted(made.positions, 'position')} of {made.source.spec} in "
        f"{counted(made.windows, 'window')}, "
        f"{made.bytes:,} bytes ({per})\n"
    )
