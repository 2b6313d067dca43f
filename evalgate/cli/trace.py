"""`evalgate trace`: look into recordings, check them, put them together, cut them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evalgate.cli import help, options
from evalgate.cli.command import Invocation, command
from evalgate.cli.completion import complete_trace
from evalgate.cli.examples import epilog
from evalgate.cli.streams import Output
from evalgate.core import counted
from evalgate.errors import CANNOT_MEASURE, PASS
from evalgate.printable import printable
from evalgate.store.remote import here, place

if TYPE_CHECKING:
    from evalgate.traces import Manifest
    from evalgate.traces.verify import Problem

app = typer.Typer(
    name="trace",
    help="Recorded references.",
    cls=help.Group,
    rich_markup_mode=None,
    no_args_is_help=True,
)

TracePath = Annotated[
    Any,
    typer.Argument(metavar="TRACE", parser=place, autocompletion=complete_trace, help="A trace folder, or its URL."),
]
NewTrace = Annotated[Path, typer.Option("--out", metavar="PATH", parser=here, help="The new trace folder, NAME.trace.")]


@app.command("info", cls=help.Command, epilog=epilog("trace info"))
@command
def info(call: Invocation, trace: TracePath, json: options.Json = False) -> None:
    """What a trace holds: reference, text, windows, settings, size."""
    from evalgate.traces import read_trace

    _show(call.output, trace, read_trace(trace).manifest, json=json)


@app.command("verify", cls=help.Command, epilog=epilog("trace verify"))
@command
def verify(call: Invocation, trace: TracePath, json: options.Json = False) -> int:
    """Check every file and every row: exit code 0 intact, 2 damaged."""
    from evalgate.store.documents import dump
    from evalgate.traces import verify as problems_of

    problems = problems_of(trace)
    if json:
        call.output.write(dump({"intact": not problems, "problems": [asdict(p) for p in problems]}, name="trace"))
    else:
        lines = [_line(problem) for problem in problems] or [f"{trace}: intact"]
        call.output.write("".join(f"{printable(line)}\n" for line in lines))
    return CANNOT_MEASURE if problems else PASS


@app.command("merge", cls=help.Command, epilog=epilog("trace merge"))
@command
def merge(
    call: Invocation,
    traces: Annotated[
        list[Any],
        typer.Argument(
            metavar="TRACE...", parser=place, autocompletion=complete_trace, help="Two trace folders or more."
        ),
    ],
    out: NewTrace,
    json: options.Json = False,
) -> None:
    """Put recordings of one reference with one setting together."""
    from evalgate.traces import merge as merged

    _show(call.output, out, merged(traces, _named(out)), json=json)


@app.command("cut", cls=help.Command, epilog=epilog("trace cut"))
@command
def cut(
    call: Invocation,
    trace: TracePath,
    out: NewTrace,
    document: Annotated[
        list[str] | None, typer.Option("--document", metavar="NAME", help="Keep this document; repeat for several.")
    ] = None,
    positions: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep the first N positions, in window order.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Keep some documents, or the first positions."""
    from evalgate.traces import cut as made

    _show(call.output, out, made(trace, _named(out), documents=document, positions=positions), json=json)


def _named(out: Path) -> Path:
    from evalgate.errors import UsageError

    if out.suffix != ".trace":
        raise UsageError(f"--out {out} is not recognised as a trace later: give it a name that ends in .trace")
    return out


def _line(problem: Problem) -> str:
    """A problem as one line that names its file once."""
    return problem.what if problem.file in problem.what else f"{problem.file}: {problem.what}"


def _show(output: Output, folder: Path, manifest: Manifest, *, json: bool) -> None:
    from evalgate.store.documents import dump

    meta = manifest.meta
    size = sum(entry.size for entry in manifest.files.values())
    head = 0 if manifest.head is None else manifest.files[manifest.head].size
    if json:
        body = {
            **asdict(meta),
            "path": str(folder),
            "created": manifest.created,
            "checksum": manifest.checksum,
            "parents": list(manifest.parents),
            "windows": manifest.windows.rows,
            "shards": len(manifest.shards),
            "positions": manifest.positions,
            "bytes": size,
            "bytes_per_position": (size - head) / max(manifest.positions, 1),
            "head_bytes": head,
        }
        output.write(dump(body, name="trace"))
        return
    full = ", float16 rows" if meta.full else ""
    each = (size - head) / max(manifest.positions, 1)
    kept = f"{meta.top_k} likeliest ids, {meta.tail_samples} tail samples (seed {meta.seed}){full}"
    states = {}
    if meta.hidden is not None:
        kept = f"hidden states of {meta.hidden.size} x {meta.hidden.dtype}, taken {meta.hidden.cut}"
        states = {"head": f"{meta.hidden.file}, {head:,} bytes (SHA-256 {meta.hidden.head[:16]})"}
    facts = {
        "reference": f"{meta.source.spec} (weights {meta.source.weights_hash[:16] or 'unknown'}, {meta.source.dtype})",
        "vocabulary": f"{counted(meta.source.vocab_size, 'id')}",
        "corpus": f"{meta.corpus} (hash {meta.corpus_hash[:16]})",
        "windows": f"{manifest.windows.rows:,}, {meta.policy.preset}, context {meta.policy.context}",
        "positions": f"{manifest.positions:,}",
        "kept": kept,
        **states,
        "size": f"{size:,} bytes, {each:,.0f} a position" + (" without the head" if head else ""),
        "created": manifest.created,
        "checksum": manifest.checksum,
    }
    facts |= {f"note {i}": note for i, note in enumerate(meta.notes, 1)}
    output.write("".join(f"{name:<11} {printable(value)}\n" for name, value in facts.items()))
