"""`evalgate show` and `evalgate schema`: a stored run printed again, and the schema of documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from evalgate import reports
from evalgate.cli import options
from evalgate.cli.command import Invocation
from evalgate.cli.completion import complete_shown
from evalgate.cli.streams import Output, say
from evalgate.errors import UsageError
from evalgate.store.files import check_writable, write_file
from evalgate.store.remote import here, place

if TYPE_CHECKING:
    from evalgate.leaderboard import Leaderboard
    from evalgate.store.remote import Place
    from evalgate.store.runs import Run


def _complete_format(incomplete: str) -> list[str]:
    return [name for name in _formats() if name.startswith(incomplete)]


def _formats() -> dict[str, reports.Report]:
    """Every report of a run, whether it is made from the summary or from the run itself."""
    return {**reports.of("summary"), **reports.of("run")}


def show(
    call: Invocation,
    run: Annotated[
        Any,
        typer.Argument(
            metavar="RUN", parser=place, autocompletion=complete_shown, help="A run folder, or its URL, or a sweep's."
        ),
    ],
    shown: options.DocumentOptions,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            autocompletion=_complete_format,
            help=f"How to print it: {', '.join(_formats())}. Default: {next(iter(_formats()))}.",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", parser=here, help="Write the run's report there, one offline HTML file."),
    ] = None,
) -> None:
    """Print a stored run again: what fits a screen, every figure, another report, or a sweep's leaderboard."""
    from evalgate.measure.stored import read_run
    from evalgate.store.sweeps import is_sweep

    if isinstance(run, Path) and is_sweep(run):
        _show_sweep_folder(call.output, run, shown.report(format, document="sweep"), html)
        return
    report = shown.report(format)
    if html is None:
        show_run(call.output, read_run(run), report)
        return
    if report is not None:
        raise UsageError(f"--html writes a file and '{report}' prints: give one of them")
    check_writable(html)
    write_file(html, reports.get("run", "html").text(read_run(run)))
    say(f"report: {html}")


def schema(
    call: Invocation,
    document: Annotated[
        Literal["summary", "gate", "sweep"],
        typer.Argument(metavar="DOCUMENT", help="summary (of a run), gate (a verdict) or sweep (a leaderboard)."),
    ] = "summary",
) -> None:
    """Print the JSON schema of the document that --json prints."""
    from evalgate.reports.json import gate_schema
    from evalgate.reports.json import schema as summary_schema
    from evalgate.reports.leaderboard_json import schema as sweep_schema

    makers = {"summary": summary_schema, "gate": gate_schema, "sweep": sweep_schema}
    call.output.write(makers[document]())


def show_run(output: Output, run: Run, report: str | None) -> None:
    """A run as the report of that name shows it; None = what fits a screen."""
    if report in (None, "json"):
        show_document(output, "summary", run.summary, json=report == "json", folder=run.place)
    elif report in reports.of("run"):
        show_report(output, reports.get("run", str(report)), run)
    else:
        show_report(output, reports.get("summary", str(report)), run.summary, folder=run.place)


def _show_sweep_folder(output: Output, folder: Path, report: str | None, html: Path | None) -> None:
    """A stored sweep's leaderboard as that report, or as a page of its own in the file `html`."""
    from evalgate.store.sweeps import read_sweep

    board = read_sweep(folder)
    if html is None:
        show_sweep(output, board, report)
        return
    if report is not None:
        raise UsageError(f"--html writes a file and '{report}' prints: give one of them")
    check_writable(html)
    write_file(html, reports.get("sweep", "leaderboard_html").text(board))
    say(f"report: {html}")


def show_sweep(output: Output, board: Leaderboard, report: str | None) -> None:
    """A leaderboard as the report of that name shows it; None = the table for a terminal."""
    if report in (None, "json"):
        show_document(output, "sweep", board, json=report == "json")
    else:
        show_report(output, reports.get("sweep", str(report)), board)


def show_documents(output: Output, kind: str, documents: Sequence[Any], *, json: bool) -> None:
    """One document for each candidate: one block after the other; as JSON a list under `candidates` where several."""
    if json and len(documents) > 1:
        from evalgate.store.documents import dump

        output.write(dump({"candidates": [document.document() for document in documents]}, name=kind))
        return
    for number, document in enumerate(documents):
        output.write("\n" * bool(number))
        show_document(output, kind, document, json=json)


def show_document(output: Output, kind: str, document: Any, *, json: bool, folder: Place | None = None) -> None:
    """A document on the output: as JSON, or in the first of its reports (evalgate.reports). folder: of a run."""
    if json:
        from evalgate.store.documents import dump

        body = document.model_dump(mode="python") if hasattr(document, "model_dump") else document.document()
        output.write(dump(body, name=kind))
    else:
        report = next(iter(reports.of(kind).values()))
        show_report(output, report, document, folder=folder)


def show_report(output: Output, report: reports.Report, document: Any, *, folder: Place | None = None) -> None:
    """A document as this report shows it, in color where the output and the report have it."""
    color = output.color and report.terminal
    text = report.text(document, width=output.width, color=color, folder=folder)
    (output.write_styled if color else output.write)(text)
