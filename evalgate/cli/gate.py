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
    from evalgate.gate.policy import Policy
    from evalgate.gate.report import GateReport
    from evalgate.measure.run import RunRequest
    from evalgate.store.runs import Run

JUDGING = frozenset(  # options that say how to judge or what to show, and so go with --run
    [
        "policy",
        "run",
        "candidate",
        "baseline",
        "sequential",
        "json",
        "quiet",
        "junit",
        "github",
        "comment",
        "badge",
        "debug",
    ]
)


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
    candidate: Annotated[
        str | None, typer.Option(metavar="NAME", help="Judge this candidate of the run alone; with --run.")
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
    noise_floor: Annotated[
        bool | None,
        typer.Option("--noise-floor/--no-noise-floor", help="Measure the noise floor. Default: as the policy says."),
    ] = None,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Show documents in random order and stop once the verdict has fallen.")
    ] = False,
    junit: outputs.Junit = None,
    github: outputs.Github = None,
    comment: outputs.Comment = None,
    badge: outputs.Badge = None,
    debug: options.Debug = False,
) -> int:
    """Judge candidates by a policy: exit code 0 pass, 1 fail, 2 cannot measure, 3 undecided."""
    session = measure.start(ctx, cand or [], 0.95)
    from evalgate.gate.policy import load_policy

    measure.check_floor(bool(noise_floor), [*([ref] if ref else []), *(cand or [])])
    rules = load_policy(policy)
    wanted = outputs.Outputs(junit=junit, github=github, comment=comment, badge=badge)
    wanted.check()
    _check_sequential(sequential, baseline)
    if candidate is not None and (run is None or sequential):
        raise UsageError("--candidate chooses among the candidates of a run: it goes with --run, without --sequential")
    before = _baseline(rules, baseline)
    if run is not None:
        _refuse_measuring(ctx)
        from evalgate.store.runs import read_run

        stored = read_run(run)
        report = _replayed(rules, stored) if sequential else _judged(rules, stored, before, candidate)
    else:
        from evalgate.measure.run import RunRequest

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
            noise_floor=_wants_floor(rules, noise_floor),
            shuffle=sequential,
        )
        if sequential:
            report = _sequential(rules, request, quiet=quiet)
        else:
            report = _judged(rules, measure.measured(request, quiet=quiet), before)
    wanted.write(report)
    print_report(session, report, json=json)
    return report.exit_code


def _judged(rules: Policy, run: Run, baseline: Run | None, candidate: str | None = None) -> GateReport:
    from evalgate.gate.judge import judge

    return judge(rules, run, baseline=baseline, candidate=candidate)


def _sequential(rules: Policy, request: RunRequest, *, quiet: bool) -> GateReport:
    from evalgate.gate.judge import assemble
    from evalgate.gate.sequential import SequentialJudge

    judge = SequentialJudge(rules, candidates=len(request.candidates), seed=request.seed)
    run = measure.measured(request, quiet=quiet, judge=judge)
    return assemble(rules, run, judge.verdicts(), stopped=judge.stopped())


def _replayed(rules: Policy, run: Run) -> GateReport:
    """A stored run judged document by document, as if it were measured now."""
    from evalgate.gate.judge import assemble
    from evalgate.gate.sequential import SequentialJudge, replay

    summary = run.summary
    judge = SequentialJudge(rules, candidates=len(summary.comparisons), seed=summary.seed)
    replay(
        judge, run.table, seed=summary.seed, noise_floor=summary.reference.noise_floor if summary.reference else None
    )
    return assemble(rules, run, judge.verdicts(), stopped=judge.stopped())


def print_report(session: Session, report: GateReport, *, json: bool) -> None:
    """The verdict on the output: the JSON document, or the terminal block."""
    if json:
        from evalgate.store.documents import dump

        session.output.write(dump(report.model_dump(mode="python"), name="gate"))
    else:
        from evalgate.reports.verdict import render

        session.output.write(render(report, width=session.output.width, color=session.output.color))


def _baseline(rules: Policy, folder: Path | None) -> Run | None:
    from evalgate.store.runs import read_run

    if folder is not None:
        return read_run(folder)
    if rules.needs_baseline:
        raise UsageError("the policy compares with a baseline: name its run folder with --baseline RUN")
    return None


def _wants_floor(rules: Policy, asked: bool | None) -> bool:
    wanted = rules.policy.noise_floor if asked is None else asked
    if rules.needs_floor and not wanted:
        raise UsageError("the policy has a rule against the noise floor: measure it, with --noise-floor")
    return wanted


def _check_sequential(sequential: bool, baseline: Path | None) -> None:
    if sequential and baseline is not None:
        raise UsageError("a sequential gate does not score every position of the baseline: leave out one of the two")


def _sides(ref: str | None, cand: list[str] | None) -> tuple[str, tuple[str, ...]]:
    if ref is None or not cand:
        raise UsageError("name the models with --ref and --cand, or a run to judge with --run")
    return ref, tuple(cand)


def _refuse_measuring(ctx: typer.Context) -> None:
    """Refuse every option that says how to measure: a stored run is judged as it is."""
    given = [p for p in ctx.command.params if p.name not in JUDGING and options.given(ctx, str(p.name))]
    named = [(p.secondary_opts if ctx.params[str(p.name)] is False else p.opts)[0] for p in given]
    if named:
        raise UsageError(f"--run judges a run that was measured: leave out {', '.join(named)}")
