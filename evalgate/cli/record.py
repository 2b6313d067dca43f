"""`evalgate record`: keep what a reference says, for candidates that come later."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evalgate.cli import measure, options
from evalgate.cli.options import LogitsDtype, WindowPreset
from evalgate.cli.session import Session
from evalgate.errors import Interrupted

if TYPE_CHECKING:
    from evalgate.measure.record import Recording, RecordRequest


class RecordFormat(str, Enum):
    """What is written (RecordRequest.format)."""

    TRACE = "trace"
    LLAMA_CPP = "llama.cpp"


def record(
    ctx: typer.Context,
    ref: options.Reference,
    out: Annotated[
        Path, typer.Option(metavar="PATH", help="The trace folder, NAME.trace, or the logits file of llama.cpp.")
    ],
    data: options.Data = None,
    split: options.Split = None,
    text_column: options.TextColumn = None,
    windows: options.Windows = WindowPreset.DISJOINT,
    context: options.Context = None,
    stride: options.Stride = None,
    limit: options.Limit = None,
    positions: options.Positions = None,
    top_k: Annotated[int, typer.Option(min=2, metavar="K", help="Likeliest ids kept exactly per position.")] = 64,
    tail_samples: Annotated[
        int, typer.Option(min=2, metavar="M", help="Ids drawn from the rest per position, in proportion.")
    ] = 16,
    full: Annotated[bool, typer.Option("--full", help="Keep whole float16 rows besides: large, exact.")] = False,
    format: Annotated[
        RecordFormat, typer.Option("--format", help="trace, or llama.cpp: a file for --kl-divergence-base.")
    ] = RecordFormat.TRACE,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    logits: options.Logits = LogitsDtype.FLOAT32,
    json: options.Json = False,
    quiet: options.Quiet = False,
    resume: options.Resume = True,
    debug: options.Debug = False,
) -> None:
    """Record a reference once, so that candidates can be compared with it without its weights."""
    session: Session = measure.start(ctx, [ref], 0.95)
    from evalgate.measure.record import RecordRequest
    from evalgate.measure.run import RunRequest

    text = RunRequest(
        kind="ppl",
        reference=None,
        candidates=(ref,),
        data=data,
        split=split,
        text_column=text_column,
        windows=windows.value,
        context=context,
        stride=stride,
        limit=limit,
        positions=positions,
        seed=seed,
        device=device,
        logits=logits.value,
        resume=resume,
    )
    request = RecordRequest(text, out, top_k=top_k, tail_samples=tail_samples, full=full, format=format.value)
    _print(session, _recorded(request, quiet=quiet), json=json)


def _recorded(request: RecordRequest, *, quiet: bool) -> Recording:
    from evalgate.cli.progress import observer
    from evalgate.measure.record import record as make
    from evalgate.measure.run import silent

    watcher = silent() if quiet else observer(sys.stderr, noun="nll")
    try:
        return make(request, observer=watcher)
    except KeyboardInterrupt:
        again = "starts again" if request.format == "llama.cpp" else "goes on from the last windows it recorded"
        raise Interrupted(f"stopped: the same command {again}") from None
    finally:
        watcher.finish()


def _print(session: Session, made: Recording, *, json: bool) -> None:
    facts = {
        "path": str(made.out),
        "source": made.source.spec,
        "vocabulary": made.source.vocab_size,
        "windows": made.windows,
        "positions": made.positions,
        "bytes": made.bytes,
        "bytes_per_position": made.bytes / made.positions,
        "checksum": None if made.manifest is None else made.manifest.checksum,
    }
    if json:
        from evalgate.store.documents import dump

        session.output.write(dump(facts, name="recording"))
        return
    per = f"{made.bytes / made.positions:,.0f} bytes a position"
    session.output.write(
        f"{made.out}: {made.positions:,} positions of {made.source.spec} in {made.windows:,} windows, "
        f"{made.bytes:,} bytes ({per})\n"
    )
