"""`evalgate gate`: measure, or take a stored run, and judge it by a policy."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evalgate.cli import ci, measure, options
from evalgate.cli.command import Invocation
from evalgate.cli.endpoint_options import EndpointOptions
from evalgate.cli.show import show_document
from evalgate.errors import UsageError

if TYPE_CHECKING:
    from evalgate.gate.policy import Policy
    from evalgate.gate.report import GateReport
    from evalgate.measure.request import RunRequest
    from evalgate.store.runs import Run

MEASURING = frozenset(  # options that say how to measure, which --run refuses
    [
        "ref",
        "cand",
        "noise_floor",
        *(f.name for group in (options.MeasureOptions, EndpointOptions) for f in fields(group)),
    ]
)


def gate(
    call: Invocation,
    ctx: typer.Context,
    *,
    policy: options.PolicyFile,
    ref: options.OptionalReference = None,
    cand: options.OptionalCandidates = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="RUN", help="Judge this run folder instead of measuring.")
    ] = None,
    candidate: Annotated[
        str | None, typer.Option(metavar="NAME", help="Judge only this candidate of the run; with --run.")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Run folder of the earlier state, on the same positions.")
    ] = None,
    measuring: options.MeasureOptions,
    endpoint: EndpointOptions,
    noise_floor: Annotated[
        bool | None,
        typer.Option("--noise-floor/--no-noise-floor", help="Measure the noise floor. Default: as the policy says."),
    ] = None,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Show documents in random order and stop once the verdict is settled.")
    ] = False,
    files: ci.ReportFiles,
    github: ci.Github = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Judge candidates by a policy: exit code 0 pass, 1 fail, 2 cannot measure, 3 undecided."""
    from evalgate.gate.policy import load_policy

    measure.check_floor(bool(noise_floor), [*([ref] if ref else []), *(cand or [])])
    rules = load_policy(policy)
    files.check()
    _check_sequential(sequential, baseline)
    if candidate is not None and (run is None or sequential):
        raise UsageError("--candidate chooses among the candidates of a run: it goes with --run, without --sequential")
    before = _baseline(rules, baseline)
    if run is not None:
        _refuse_measuring(ctx)
        from evalgate.measure.stored import read_run

        stored = read_run(run)
        report = _replayed(rules, stored) if sequential else _judged(rules, stored, before, candidate)
    else:
        if ref is None or not cand:
            raise UsageError("name the models with --ref and --cand, or a run to judge with --run")
        request = measuring.request(
            "kl",
            ref,
            cand,
            out=measuring.run_folder("gate"),
            endpoint=endpoint.settings(),
            confidence=rules.policy.confidence,
            noise_floor=_wants_floor(rules, noise_floor),
            shuffle=sequential,
        )
        if sequential:
            report = _sequential(rules, request, quiet=quiet)
        else:
            report = _judged(rules, measure.measured(request, quiet=quiet), before)
    files.write(report)
    ci.write_github(report, asked=github)
    show_document(call.output, "gate", report, json=json)
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


def _baseline(rules: Policy, folder: Path | None) -> Run | None:
    from evalgate.measure.stored import read_run

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
        raise UsageError(
            "a sequential gate does not score every position of the baseline: leave out --sequential or --baseline"
        )


def _refuse_measuring(ctx: typer.Context) -> None:
    """Refuse every option that says how to measure: a stored run is judged as it is."""
    given = [p for p in ctx.command.params if p.name in MEASURING and options.given(ctx, str(p.name))]
    named = [(p.secondary_opts if ctx.params[str(p.name)] is False else p.opts)[0] for p in given]
    if named:
        raise UsageError(f"--run judges a run that was measured: leave out {', '.join(named)}")
