"""`evalgate kl`, `evalgate agree` and `evalgate ppl`: measure, store, print the screen or another report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from evalgate.cli import options
from evalgate.cli.command import Invocation
from evalgate.cli.endpoint_options import EndpointOptions
from evalgate.cli.show import show_document, show_run
from evalgate.cli.streams import Output, say
from evalgate.errors import Interrupted, UsageError
from evalgate.specs import SourceSpec

if TYPE_CHECKING:
    from evalgate.measure.request import Judge, RunRequest, TextCheck
    from evalgate.store.runs import Run


def comparison(kind: Literal["kl", "agree"], help: str) -> Callable[..., None]:
    """The command that measures candidates against a reference; `kind` is what its reports lead with."""

    def compared(
        call: Invocation,
        ref: options.Reference,
        cand: options.Candidates,
        run: options.MeasureOptions,
        endpoint: EndpointOptions,
        shown: options.DocumentOptions,
        confidence: options.Confidence = 0.95,
        noise_floor: options.NoiseFloor = False,
        dry_run: options.DryRun = False,
        quiet: options.Quiet = False,
    ) -> None:
        report = shown.report()
        check_floor(noise_floor, [ref, *cand])
        request = run.request(
            kind,
            ref,
            cand,
            out=run.run_folder(kind),
            endpoint=endpoint.settings(),
            confidence=confidence,
            noise_floor=noise_floor,
        )
        if dry_run:
            show_forecast(call.output, request, report)
        else:
            _report(call, measured(request, quiet=quiet), report, quiet=quiet)

    compared.__doc__ = help
    return compared


def ppl(
    call: Invocation,
    model: options.Models,
    run: options.MeasureOptions,
    endpoint: EndpointOptions,
    shown: options.DocumentOptions,
    confidence: options.Confidence = 0.95,
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
) -> None:
    """Perplexity and bits per byte of models on a text, with intervals."""
    report = shown.report()
    request = run.request(
        "ppl", None, model, out=run.run_folder("ppl"), endpoint=endpoint.settings(), confidence=confidence
    )
    if dry_run:
        show_forecast(call.output, request, report)
    else:
        _report(call, measured(request, quiet=quiet), report, quiet=quiet)


def show_forecast(output: Output, request: RunRequest, report: str | None) -> None:
    """Print what a run would do. report: the one that is asked for, None = sentences.

    Raises:
        UsageError: another report than JSON is asked for; and what refuses the run before it loads or asks anything.
    """
    from evalgate.measure.forecast import forecast

    check_dry(report)
    show_document(output, "forecast", forecast(request), json=report == "json")


def check_dry(report: str | None) -> None:
    """Refuse a report that a dry run cannot fill. Raises UsageError."""
    if report not in (None, "json"):
        named = "--full" if report == "terminal" else f"--{report}"
        raise UsageError(f"--dry-run has no figures for {named}: leave one of them out, or give --json")


def check_floor(asked: bool, models: Sequence[SourceSpec]) -> None:
    """Refuse --noise-floor where some side is an endpoint. Raises UsageError."""
    remote = next((source.spec for source in models if source.remote), None)
    if asked and remote is not None:
        raise UsageError(f"--noise-floor restarts and rebatches models and {remote} is not run here: leave it out")


def measured(
    request: RunRequest,
    *,
    quiet: bool,
    judge: Judge | None = None,
    text_check: TextCheck | None = None,
    page: bool = True,
) -> Run:
    """Run the request under a progress observer. judge: may end it early. text_check: may refuse the text. page: leave
    report.html in the run folder.

    Raises Interrupted where the user stops it; its message says how to resume.
    """
    from evalgate.cli.progress import observer
    from evalgate.measure.recordings import shown_mean
    from evalgate.measure.run import run

    watcher = None if quiet else observer(sys.stderr, noun=shown_mean(request).noun)
    try:
        return run(request, observer=watcher, judge=judge, text_check=text_check, page=page)
    except KeyboardInterrupt:
        raise Interrupted("stopped: run the same command again to resume after the last windows it measured") from None
    finally:
        if watcher is not None:
            watcher.finish()


def _report(call: Invocation, run: Run, report: str | None, *, quiet: bool) -> None:
    show_run(call.output, run, report)
    if run.place is not None and not quiet and report is not None:  # the screen says it itself
        say(f"run folder: {run.place}")
