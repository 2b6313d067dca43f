"""`evalgate plan`: how many documents a limit needs for a verdict."""

from __future__ import annotations

from typing import Annotated

import typer

from evalgate.cli import options
from evalgate.cli.command import Invocation
from evalgate.cli.show import show_documents
from evalgate.errors import UsageError


def plan(
    call: Invocation,
    run: options.RunFolder,
    limits: options.LimitOptions,
    power: Annotated[float, typer.Option(metavar="P", help="Chance of a verdict, between 0 and 1.")] = 0.9,
    candidate: options.CandidateName = None,
    confidence: options.Confidence = 0.95,
    json: options.Json = False,
) -> None:
    """How many documents a limit needs for a verdict, estimated from an existing run."""
    from evalgate.gate.compare import sides
    from evalgate.gate.oneline import one_rule, with_rules
    from evalgate.gate.plan import Plans
    from evalgate.gate.plan import plan as planned
    from evalgate.measure.stored import read_run

    rules = [one_rule(end, text) for end in ("max", "min") for text in getattr(limits, end) or ()]
    if not rules:
        raise UsageError("there is no limit to plan for: give --max METRIC=VALUE or --min METRIC=VALUE")
    rules = list(with_rules(None, rules).rules)  # refuses what the gate refuses
    found = [
        Plans(
            scores.candidate,
            power,
            confidence,
            tuple(planned(rule, scores, power=power, confidence=confidence) for rule in rules),
        )
        for scores in sides(read_run(run), candidate)
    ]
    show_documents(call.output, "plan", found, json=json)
