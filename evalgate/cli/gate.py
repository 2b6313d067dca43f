"""`evalgate gate`: measure, or take a stored run, and judge it by a policy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evalgate.cli import measure, options, outputs
from evalgate.cli.endpoint_options import with_endpoint_options
from evalgate.cli.options import LogitsDtype, WindowPreset
from evalgate.cli.session import Session
from evalgate.errors import UsageError

if TYPE_CHECKING:
    from evalgate.endpoints.settings import EndpointSettings
    from evalgate.policy import Policy
    from evalgate.runs import Run
    from evalgate.verdict import GateReport


@with_endpoint_options
def gate(
    ctx: typer.Context,
    endpoint: EndpointSettings,
    policy: options.PolicyFile,
    ref: options.OptionalReference = None,
    cand: options.OptionalCandidates = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="RUN", help="Judge this run folder instead of measuring.")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Run folder of the state before, on the same positions.")
    ] = None,
    data: options.Data = None,
    split: options.Split = None,
    text_column: options.TextColumn = None,
    windows: options.Windows = WindowPreset.DISJOINT,
    context: options.Context = None,
    stride: options.Stride = None,
    limit: options.Limit = None,
    positions: options.Positions = None,
    budget: options.BudgetText = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    logits: options.Logits = LogitsDtype.FLOAT32,
    out: options.Out = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    overwrite: options.Overwrite = False,
    resume: options.Resume = True,
    junit: outputs.Junit = None,
    github: outputs.Github = None,
    comment: outputs.Comment = None,
    badge: outputs.Badge = None,
    debug: options.Debug = False,
) -> int:
    """Judge candidates by a policy: exit code 0 pass, 1 fail, 2 cannot measure, 3 undecided."""
    session = measure.start(ctx, cand or [], 0.95)
    from evalgate.policy import load_policy

    rules = load_policy(policy)
    wanted = outputs.Outputs(junit=junit, github=github, comment=comment, badge=badge)
    wanted.check()
    before = _baseline(rules, baseline)
    if run is not None:
        _refuse_both(ref, cand)
        from evalgate.runs import read_run

        measured = read_run(run)
    else:
        from evalgate.pipeline import RunRequest

        reference, candidates = _sides(ref, cand)
        request = RunRequest(
            kind="kl",
            reference=reference,
            candidates=candidates,
            data=data,
            split=split,
            text_column=text_column,
            windows=windows.value,
            context=context,
            stride=stride,
            limit=limit,
            seed=seed,
            confidence=rules.policy.confidence,
            device=device,
            logits=logits.value,
            out=measure.target("gate", out, overwrite=overwrite),
            resume=resume,
            overwrite=overwrite,
            endpoint=endpoint,
            positions=positions,
            budget=measure.budget_of(budget),
        )
        measured = measure.measured(request, quiet=quiet)
    from evalgate.gate import judge

    report = judge(rules, measured, baseline=before)
    wanted.write(report)
    print_report(session, report, json=json)
    return report.exit_code


def print_report(session: Session, report: GateReport, *, json: bool) -> None:
    """The verdict on the output: the JSON document, or the terminal block."""
    if json:
        from evalgate.document import dump

        session.output.write(dump(report.model_dump(mode="python"), name="gate"))
    else:
        from evalgate.reports.verdict import render

        session.output.write(render(report, width=session.output.width, color=session.output.color))


def _baseline(rules: Policy, folder: Path | None) -> Run | None:
    from evalgate.runs import read_run

    if folder is not None:
        return read_run(folder)
    if rules.needs_baseline:
        raise UsageError("the policy compares with a baseline: name its run folder with --baseline RUN")
    return None


def _sides(ref: str | None, cand: list[str] | None) -> tuple[str, tuple[str, ...]]:
    if ref is None or not cand:
        raise UsageError("name the models with --ref and --cand, or a run to judge with --run")
    return ref, tuple(cand)


def _refuse_both(ref: str | None, cand: list[str] | None) -> None:
    if ref is not None or cand:
        raise UsageError("--run judges a run that was measured: leave out --ref and --cand")
