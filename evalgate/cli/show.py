"""`evalgate show` and `evalgate schema`: a stored run printed again, and the schema of documents."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evalgate.cli import options
from evalgate.cli.command import Invocation
from evalgate.cli.streams import Output

if TYPE_CHECKING:
    from evalgate.summary import Summary


def show(
    call: Invocation,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    json: options.Json = False,
) -> None:
    """Print a stored run's block again."""
    from evalgate.store.runs import read_run

    print_summary(call.output, read_run(run).summary, json=json)


class Document(str, Enum):
    """A document that --json prints."""

    SUMMARY = "summary"
    GATE = "gate"


def schema(
    call: Invocation,
    document: Annotated[
        Document, typer.Argument(metavar="DOCUMENT", help="summary (of a run) or gate (a verdict).")
    ] = Document.SUMMARY,
) -> None:
    """Print the JSON schema of the document that --json prints."""
    from evalgate.reports.json import gate_schema
    from evalgate.reports.json import schema as json_schema

    call.output.write(gate_schema() if document is Document.GATE else json_schema())


def print_summary(output: Output, summary: Summary, *, json: bool) -> None:
    """The summary on the output: the JSON document, or the terminal block."""
    if json:
        from evalgate.reports.json import render as render_json

        output.write(render_json(summary))
    else:
        from evalgate.reports.terminal import render

        output.write(render(summary, width=output.width, color=output.color))
