"""`evalgate diff`: the worst tokens of a run, in their text."""

from __future__ import annotations

from typing import Annotated

import typer

from evalgate.cli import options
from evalgate.cli.command import Invocation
from evalgate.cli.completion import complete_metric
from evalgate.cli.show import show_documents


def diff(
    call: Invocation,
    run: options.RunFolder,
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            metavar="METRIC",
            autocompletion=complete_metric,
            help="Worst by this metric. Default: kl, or nll without a reference.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, metavar="N", help="How many tokens of a candidate.")] = 10,
    candidate: options.CandidateName = None,
    domain: Annotated[str | None, typer.Option(metavar="NAME", help="Only tokens of this domain.")] = None,
    context: Annotated[
        int, typer.Option(min=0, max=10_000, metavar="TOKENS", help="How many tokens before each are shown.")
    ] = 24,
    json: options.Json = False,
) -> None:
    """Show the worst tokens in their text, and what both sides would rather have said."""
    from evalgate.gate.compare import sides
    from evalgate.measure.stored import read_run
    from evalgate.stats.worst import worst_tokens

    stored = read_run(run)
    found = [
        worst_tokens(stored, scores, metric=by, domain=domain, limit=limit, context=context)
        for scores in sides(stored, candidate)
    ]
    show_documents(call.output, "diff", found, json=json)
