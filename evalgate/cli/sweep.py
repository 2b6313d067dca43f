"""`evalgate sweep`: several candidates against one reference, their leaderboard, and what is published of it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evalgate.cli import options
from evalgate.cli.command import Invocation
from evalgate.cli.endpoint_options import EndpointOptions
from evalgate.cli.measure import check_dry, check_floor
from evalgate.cli.show import show_document, show_sweep
from evalgate.cli.streams import Output, say
from evalgate.errors import Interrupted, UsageError
from evalgate.specs import parse

if TYPE_CHECKING:
    from evalgate.measure.sweep import SweepRequest
    from evalgate.sweeps import Sweep


def sweep(
    call: Invocation,
    ctx: typer.Context,
    run: options.MeasureOptions,
    endpoint: EndpointOptions,
    shown: options.DocumentOptions,
    listing: Annotated[
        Path | None,
        typer.Argument(metavar="[LIST.toml]", help="A list of candidates; options typed here win over its own."),
    ] = None,
    ref: options.OptionalReference = None,
    cand: options.OptionalCandidates = None,
    confidence: options.Confidence = 0.95,
    noise_floor: options.NoiseFloor = False,
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
) -> None:
    """Rank candidates against one reference: leaderboard, KL against size, and Markdown for a model card."""
    from evalgate.measure.sweep import SweepRequest
    from evalgate.sweeps.listing import read_listing
    from evalgate.sweeps.names import named

    report = shown.report(document="sweep")
    found = None if listing is None else read_listing(listing)
    if found is not None and cand:
        raise UsageError(f"{listing} and --cand both name candidates: give one of them")
    listed = {} if found is None else found.options
    typed = {name: value for name, value in listed.items() if not options.given(ctx, name)}
    floor, level = typed.pop("noise_floor", noise_floor), typed.pop("confidence", confidence)
    reference, candidates = ref, list(cand or [])
    names, sizes = {}, {}
    if found is not None:
        reference = ref or (parse(found.ref) if found.ref else None)
        candidates = [parse(entry.spec) for entry in found.candidates]
        names = {entry.spec: entry.name for entry in found.candidates if entry.name is not None}
        sizes = {entry.spec: entry.bytes for entry in found.candidates if entry.bytes is not None}
    if reference is None:
        raise UsageError("a sweep needs a reference: name one with --ref SPEC, or `ref` in the list")
    if not candidates:
        raise UsageError("a sweep needs candidates: name each with --cand SPEC, or give a LIST.toml")
    check_floor(floor, [reference, *candidates])
    asked = run.request(
        "kl",
        reference,
        candidates,
        out=run.out,
        endpoint=endpoint.settings(),
        confidence=level,
        noise_floor=floor,
        **typed,
    )
    request = SweepRequest(asked, named(asked.candidates, names, sizes))
    if dry_run:
        _foresee(call.output, request, report)
        return
    done = _swept(request, quiet=quiet)
    show_sweep(call.output, done.board, report)
    for note in done.left_out:
        say(note)
    if not quiet:
        say(f"sweep folder: {done.folder}")


def _foresee(output: Output, request: SweepRequest, report: str | None) -> None:
    """Print what the sweep would do."""
    from evalgate.measure.forecast import forecast_sweep

    check_dry(report)
    run = request.run if request.run.out is not None else replace(request.run, out=options.new_folder("sweep"))
    show_document(output, "forecast", forecast_sweep(replace(request, run=run)), json=report == "json")


def _swept(request: SweepRequest, *, quiet: bool) -> Sweep:
    """Run the sweep under a progress observer. Raises Interrupted where the user stops it."""
    from evalgate.cli.progress import observer
    from evalgate.measure.recordings import shown_mean
    from evalgate.sweeps import run_sweep

    watcher = None if quiet else observer(sys.stderr, noun=shown_mean(request.run).noun)
    try:
        return run_sweep(request, new_folder=lambda: options.new_folder("sweep"), observer=watcher)
    except KeyboardInterrupt:
        raise Interrupted("stopped: run the same command again, it goes on after what it has measured") from None
    finally:
        if watcher is not None:
            watcher.finish()
