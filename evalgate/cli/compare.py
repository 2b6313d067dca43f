"""`evalgate compare`: did the new candidate beat the old one, on the same positions?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evalgate.cli import options
from evalgate.cli.command import Invocation
from evalgate.cli.completion import complete_metric, complete_run
from evalgate.cli.show import show_documents


def compare(
    call: Invocation,
    first: Annotated[Path, typer.Argument(metavar="RUN_A", autocompletion=complete_run, help="A run folder.")],
    second: Annotated[
        Path, typer.Argument(metavar="RUN_B", autocompletion=complete_run, help="A run folder of the same positions.")
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
