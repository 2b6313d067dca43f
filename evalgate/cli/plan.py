"""`evalgate plan`: how many documents a limit needs for a verdict."""

from __future__ import annotations

from typing import Annotated

import typer

from evalgate.cli import options
from evalgate.cli.command import Invocation
from evalgate.cli.show import show_document


def plan(
    call: Invocation,
    run: options.RunFolder,
    limit: Annotated[
        list[str], typer.Option(metavar="METRIC=VALUE", help="A limit: kl=0.01, kl.p99=0.1, top1_agreement=0.97.")
    ],
    power: Annotated[float, typer.Option(metavar="P", help="Chance of a verdict, between 0 and 1.")] = 0.9,
    candidate: options.CandidateName = None,
    confidence: options.Confidence = 0.95,
    json: options.Json = False,
) -> None:
    """How many documents a limit needs for a verdict, estimated from an existing run."""
    from evalgate.gate.compare import side
    from evalgate.gate.oneline import parse_limit
    from evalgate.gate.plan import Plans
    from evalgate.gate.plan import plan as planned
    from evalgate.measure.stored import read_run

    rules = [parse_limit(text) for text in limit]
    scores = side(read_run(run), candidate)
    plans = tuple(planned(rule, scores, power=power, confidence=confidence) for rule in rules)
    show_document(call.output, "plan", Plans(power, confidence, plans), json=json)
