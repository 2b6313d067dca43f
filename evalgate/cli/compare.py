"""`evalgate compare`: did the new candidate beat the old one, on the same positions?"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from evalgate.cli import options
from evalgate.cli.command import Invocation
from evalgate.cli.completion import complete_metric, complete_run
from evalgate.cli.show import show_documents
from evalgate.store.remote import place


def compare(
    call: Invocation,
    first: Annotated[
        Any,
        typer.Argument(metavar="RUN_A", parser=place, autocompletion=complete_run, help="A run folder, or its URL."),
    ],
    second: Annotated[
        Any,
        typer.Argument(
            metavar="RUN_B", parser=place, autocompletion=complete_run, help="A run of the same positions, or its URL."
        ),
    ],
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", autocompletion=complete_metric, help="Only these metrics; repeatable."),
    ] = None,
    candidate_a: Annotated[str | None, typer.Option(metavar="NAME", help="Only this candidate of RUN_A.")] = None,
    candidate_b: Annotated[str | None, typer.Option(metavar="NAME", help="Only this candidate of RUN_B.")] = None,
    confidence: options.Confidence = 0.95,
    json: options.Json = False,
) -> None:
    """Compare two runs position by position: paired differences, and McNemar's test for flips."""
    from evalgate.gate.compare import METRICS, paired_runs
    from evalgate.measure.stored import read_run

    pairs = paired_runs(
        read_run(first),
        read_run(second),
        candidates=(candidate_a, candidate_b),
        metrics=metric or METRICS,
        confidence=confidence,
    )
    show_documents(call.output, "compare", pairs, json=json)
