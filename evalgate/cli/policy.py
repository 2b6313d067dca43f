"""`evalgate policy`: check, write and explain policy files."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evalgate.cli import help
from evalgate.cli.command import Invocation, command
from evalgate.cli.completion import complete_policy, complete_preset, complete_run
from evalgate.cli.examples import epilog
from evalgate.errors import UsageError, choose
from evalgate.printable import printable
from evalgate.store.files import write_file
from evalgate.store.remote import place

if TYPE_CHECKING:
    from evalgate.gate.policy import Policy, Rule

app = typer.Typer(
    name="policy",
    help="Check, write and explain policy files.",
    cls=help.Group,
    rich_markup_mode=None,
    no_args_is_help=True,
)

Source = Annotated[
    str, typer.Argument(metavar="POLICY", autocompletion=complete_policy, help="A TOML file or a preset.")
]


@app.command("check", cls=help.Command, epilog=epilog("policy check"))
@command
def check(
    call: Invocation,
    policy: Source,
    run: Annotated[
        Any,
        typer.Option(
            metavar="RUN",
            parser=place,
            autocompletion=complete_run,
            help="Also check that this run has every figure the rules need.",
        ),
    ] = None,
    baseline: Annotated[
        Any,
        typer.Option(
            metavar="RUN", parser=place, autocompletion=complete_run, help="The baseline run, for rules that need one."
        ),
    ] = None,
) -> None:
    """Check a policy file: unknown keys, metrics and statistics are named."""
    from evalgate.gate.policy import advice, load_policy

    loaded = load_policy(policy)
    if run is not None:
        from evalgate.gate.judge import judge
        from evalgate.measure.stored import read_run

        judge(loaded, read_run(run), baseline=None if baseline is None else read_run(baseline))
    notes = "".join(f"note: {printable(said)}\n" for said in advice(loaded))
    call.output.write(f"{policy}: {_rules(loaded)}, no error\n{notes}")


@app.command("init", cls=help.Command, epilog=epilog("policy init"))
@command
def init(
    call: Invocation,
    preset: Annotated[
        str, typer.Option(metavar="NAME", autocompletion=complete_preset, help="lossless, 8bit or 4bit.")
    ] = "8bit",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Where to write it. Default: standard output.")
    ] = None,
) -> None:
    """Write a policy file to start from: a preset, with what its limits rest on."""
    from evalgate.gate.policy import PRESETS, policy_text

    if preset not in PRESETS:
        raise UsageError(f"there is no preset {preset!r}: {choose(preset, PRESETS)}")
    text = policy_text(preset)
    if out is None:
        call.output.write(text)
        return
    if os.path.lexists(out):
        raise UsageError(f"{out} exists and is left alone: choose another --out", file=str(out))
    write_file(out, text)


@app.command("explain", cls=help.Command, epilog=epilog("policy explain"))
@command
def explain(call: Invocation, policy: Source) -> None:
    """Explain in words what a policy requires and how it reaches its verdict."""
    from evalgate.gate.policy import load_policy

    call.output.write(explanation(load_policy(policy), width=call.output.width))


def explanation(policy: Policy, *, width: int) -> str:
    """The policy in sentences, no line wider than `width`."""
    from evalgate.gate.policy import advice

    settings = policy.policy
    paragraphs = [f"Policy {settings.name!r}: {_rules(policy)}, all of which have to pass."]
    paragraphs += [f"{number}. {_sentence(rule)}" for number, rule in enumerate(policy.rules, 1)]
    paragraphs.append(
        f"A rule passes when its whole {settings.confidence * 100:g} % interval is inside the limit, and so is a bound "
        "that holds for heavy tails too. It fails when the interval is wholly outside, and is undecided between. "
        "Intervals are over documents."
    )
    paragraphs += dict.fromkeys(rule.kind.means for rule in policy.rules if rule.kind.means)
    if settings.baseline == "optional" and policy.needs_baseline:
        paragraphs.append("Without a baseline run the rules that need one are not applicable, and fail nothing.")
    if settings.correction == "holm":
        paragraphs.append(
            f"Holm's correction: with {settings.confidence * 100:g} % confidence no verdict of any rule is wrong."
        )
    paragraphs.append(
        {
            "undecided": "An undecided gate ends with exit code 3.",
            "fail": "An undecided gate counts as failed (exit code 1).",
            "pass": "An undecided gate counts as passed (exit code 0).",
        }[settings.on_undecided]
    )
    own = [f"{rule.label!r} counts as {rule.on_undecided}" for rule in policy.rules if rule.on_undecided]
    if own:
        paragraphs.append(f"Where undecided, {', '.join(own)}.")
    paragraphs.append(
        "For that bound a document of average length counts as at most "
        + (f"{settings.clip:g} distances" if settings.clip else "3 distances (more beyond 24 documents)")
        + " from the ideal figure to its limit."
    )
    paragraphs += [f"Note: {said}." for said in advice(policy)]
    lines = [line for text in paragraphs for line in (*textwrap.wrap(text, width, subsequent_indent="   "), "")]
    return "\n".join(lines[:-1]) + "\n"


def _rules(policy: Policy) -> str:
    return "1 rule" if len(policy.rules) == 1 else f"{len(policy.rules)} rules"


def _sentence(rule: Rule) -> str:
    from evalgate.gate.policy import resolve

    metric, statistic = resolve(rule)
    name = f"{rule.name}: " if rule.name else ""
    unit = "" if rule.max_ratio is not None else f" ({metric.unit})"
    kind = "percentile" if statistic.kind == "percentile" else "mean"
    return f"{name}{rule.text}{unit}, a {kind} over {'windows' if metric.per == 'window' else 'positions'}."
