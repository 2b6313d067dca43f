"""`evalgate slices`: one metric by domain, position, entropy, token class or document."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from evalgate.cli import options
from evalgate.cli.command import Invocation
from evalgate.cli.show import show_documents


class Cut(str, Enum):
    """What the positions are cut by (evalgate.stats.slices.By)."""

    DOMAIN = "domain"
    POSITION = "position"
    ENTROPY = "entropy"
    TOKEN = "token"
    DOCUMENT = "document"


def slices(
    call: Invocation,
    run: options.RunFolder,
    metric: options.MetricName = "kl",
    by: Annotated[Cut, typer.Option(metavar="CUT", help="domain, position, entropy, token or document.")] = Cut.DOMAIN,
    candidate: options.CandidateName = None,
    confidence: options.Confidence = 0.95,
    json: options.Json = False,
) -> None:
    """Where did it break: a metric by part, with intervals that hold together."""
    from evalgate.gate.compare import sides
    from evalgate.measure.stored import read_run
    from evalgate.stats.slices import slice_metric

    stored = read_run(run)
    tables = [
        slice_metric(scores, metric, by=by.value, token_texts=stored.token_texts, confidence=confidence)
        for scores in sides(stored, candidate)
    ]
    show_documents(call.output, "slices", tables, json=json)
