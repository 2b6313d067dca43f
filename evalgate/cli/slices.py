"""`evalgate slices`: one metric by domain, position, entropy, token class or document."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from evalgate.cli import options
from evalgate.cli.command import Invocation


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
    from evalgate.gate.compare import side
    from evalgate.metrics import get
    from evalgate.stats.slices import slice_metric
    from evalgate.store.runs import read_run

    stored = read_run(run)
    scores = side(stored, candidate)
    table = slice_metric(scores, metric, by=by.value, token_texts=stored.token_texts, confidence=confidence)
    series = get(metric).series(scores)[get(metric).primary]
    overall = float(series.values.sum() / (len(series.values) if series.sizes is None else series.sizes.sum()))
    if json:
        from evalgate.store.documents import dump

        call.output.write(dump({**table.document(), "overall": overall}, name="slices"))
    else:
        from evalgate.reports.slices import render

        call.output.write(render(table, overall=overall))
