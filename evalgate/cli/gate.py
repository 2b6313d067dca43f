"""`evalgate gate`: measure, or take a stored run, and judge it by a policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evalgate.cli import ci, measure, options
from evalgate.cli import help as panels
from evalgate.cli.command import Invocation
from evalgate.cli.completion import complete_run
from evalgate.cli.endpoint_options import EndpointOptions
from evalgate.cli.failures import Documented, failure_of
from evalgate.cli.show import show_document
from evalgate.cli.streams import say
from evalgate.core import counted
from evalgate.errors import PASS, EvalgateError, UsageError
from evalgate.reports._headline import with_headlines
from evalgate.specs import SourceSpec
from evalgate.store.remote import is_there, place

if TYPE_CHECKING:
    from evalgate.gate.policy import Policy
    from evalgate.gate.report import GateReport
    from evalgate.measure.request import RunRequest
    from evalgate.store.remote import Place
    from evalgate.store.runs import Run


@dataclass(frozen=True, kw_only=True)
class RuleOptions(options.LimitOptions):
    """Rules on the command line, beside those of a policy or in place of one."""

    no_regression: Annotated[
        list[str] | None,
        typer.Option(
            "--no-regression",
            metavar="METRIC[=MARGIN]",
            rich_help_panel=panels.MORE_GATE,
            help="Fail only where this is proven to be worse than the baseline, by more than the margin.",
        ),
    ] = None


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
    policy: options.OptionalPolicyFile = None,
    limits: RuleOptions,
    ref: options.OptionalReference = None,
    cand: options.OptionalCandidates = None,
    run: Annotated[
        Any,
        typer.Option(
            "--run",
            metavar="RUN",
            parser=place,
            autocompletion=complete_run,
            rich_help_panel=panels.MODELS,
            help="Judge this run folder instead of measuring.",
        ),
    ] = None,
    candidate: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=panels.MORE_GATE,
            help="Judge only this candidate of the run; with --run.",
        ),
    ] = None,
    baseline: Annotated[
        Any,
        typer.Option(
            metavar="RUN",
            parser=place,
            autocompletion=complete_run,
            rich_help_panel=panels.MODELS,
            help="Run folder of the earlier state, on the same positions.",
        ),
    ] = None,
    baseline_optional: Annotated[
        bool,
        typer.Option(
            "--baseline-optional",
            rich_help_panel=panels.MORE_GATE,
            help="Where there is no baseline run yet, rules that need one are not applicable.",
        ),
    ] = False,
    measuring: options.MeasureOptions,
    endpoint: EndpointOptions,
    noise_floor: Annotated[
        bool | None,
        typer.Option(
            "--noise-floor/--no-noise-floor",
            rich_help_panel=panels.MORE_GATE,
            help="Measure the noise floor. Default: as the policy says.",
        ),
    ] = None,
    sequential: Annotated[
        bool,
        typer.Option(
            "--sequential",
            rich_help_panel=panels.MORE_GATE,
            help="Show documents in random order and stop once the verdict is settled.",
        ),
    ] = False,
    files: ci.ReportFiles,
    github: ci.Github = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Judge candidates by a policy: exit code 0 pass, 1 fail, 2 cannot measure, 3 undecided."""
    known = _Known(policy=policy, reference=ref, run=run)
    try:
        rules = known.rules = _policy(policy, limits, optional=baseline_optional)
        files.check()
        if candidate is not None and (run is None or sequential):
            raise UsageError(
                "--candidate chooses among the candidates of a run: it goes with --run, without --sequential"
            )
        before = _baseline(rules, baseline, sequential=sequential)
        if run is not None:
            _refuse_measuring(ctx)
            request = None
        else:
            request = _request(rules, ref, cand, measuring, endpoint, noise_floor=noise_floor, shuffle=sequential)
        if dry_run:
            _foresee(call, rules, request, run, files, sequential=sequential, json=json)
            return PASS
        if run is not None:
            report = _of_run(rules, run, before, candidate, sequential=sequential)
        else:
            assert request is not None
            report = _measured(rules, request, before, sequential=sequential, quiet=quiet)
        ci.leave(report, files, github=github)
    except (Exception, KeyboardInterrupt) as error:
        if dry_run:  # which leaves no file
            raise
        said = known.unmeasured(error)
        with suppress(EvalgateError):  # what cannot be written either is not the news
            ci.leave(said, files, github=github)
        raise Documented(error, said.model_dump(mode="python")) from error
    show_document(call.output, "gate", report, json=json)
    return report.exit_code


def _foresee(
    call: Invocation,
    rules: Policy,
    request: RunRequest | None,
    run: Place | None,
    files: ci.ReportFiles,
    *,
    sequential: bool,
    json: bool,
) -> None:
    """Print what the gate would do: measure `request`, or judge the stored run."""
    from evalgate.gate.foresight import check_parts
    from evalgate.measure.forecast import forecast, forecast_stored
    from evalgate.measure.stored import read_run

    if request is not None:
        found = forecast(request, text_check=partial(check_parts, rules))
    else:
        assert run is not None  # one of both is given
        found = forecast_stored(read_run(run).summary, str(run))
    judged = f"judged by the policy {rules.policy.name!r}: {counted(len(rules.rules), 'rule')}"
    early = ["the sequential gate may stop before all windows are measured"] if sequential else []
    found = replace(found, kind="gate", notes=(*found.notes, judged, *early), writes=(*found.writes, *files.shown()))
    show_document(call.output, "forecast", found, json=json)


def leave_unread(args: Sequence[str], error: BaseException) -> None:
    """Write the reports that a command line names which cannot be read as a whole, as far as they can be written."""
    if "--dry-run" in args:
        return
    found = {name: _typed(args, f"--{name}") for name in ci.names()}
    files = ci.ReportFiles(**{name: Path(path) for name, path in found.items() if path is not None})
    github = True if "--github" in args else False if "--no-github" in args else None
    with suppress(EvalgateError):  # the command line's own mistake is reported
        ci.leave(_Known(_typed(args, "--policy"), None, None).unmeasured(error), files, github=github)


def _typed(args: Sequence[str], option: str) -> str | None:
    """The value of an option as it was typed; None where it was not."""
    for word, after in zip(args, [*args[1:], ""], strict=True):
        if word.startswith(f"{option}="):
            return word.partition("=")[2] or None
        if word == option and after and not after.startswith("-"):
            return after
    return None


@dataclass
class _Known:
    """What a gate that ends in an error can say of itself."""

    policy: str | None
    reference: SourceSpec | None
    run: Place | None
    rules: Policy | None = None

    def unmeasured(self, error: BaseException) -> GateReport:
        """The document of that error."""
        from evalgate.gate.policy import policy_name
        from evalgate.gate.report import Unmeasured
        from evalgate.gate.unmeasured import unmeasured

        name = policy_name(self.policy) if self.rules is None else self.rules.policy.name
        return unmeasured(
            Unmeasured.model_validate(failure_of(error).document()),
            name=name,
            policy=self.rules,
            reference=None if self.reference is None else self.reference.spec,
            run=None if self.run is None else str(self.run),
        )


def _policy(source: str | None, limits: RuleOptions, *, optional: bool) -> Policy:
    from evalgate.gate.oneline import one_rule, with_rules
    from evalgate.gate.policy import load_policy

    file = None if source is None else load_policy(source)
    sides = {"max": limits.max, "min": limits.min, "regression": limits.no_regression}
    rules = with_rules(file, [one_rule(side, text) for side, texts in sides.items() for text in texts or ()])
    return rules.optional_baseline() if optional else rules


def _request(
    rules: Policy,
    ref: SourceSpec | None,
    cand: list[SourceSpec] | None,
    measuring: options.MeasureOptions,
    endpoint: EndpointOptions,
    *,
    noise_floor: bool | None,
    shuffle: bool,
) -> RunRequest:
    """What is measured; refused where no such measurement could pass."""
    from evalgate.gate.foresight import check_sources
    from evalgate.gate.kinds import Sources
    from evalgate.measure.recordings import is_recorded

    if ref is None or not cand:
        raise UsageError("name the models with --ref and --cand, or a run to judge with --run")
    models = [ref, *cand]
    measure.check_floor(bool(noise_floor), models)
    remote = next((model.spec for model in models if model.remote), "")
    check_sources(rules, Sources(remote=remote, recorded=is_recorded(ref)))
    return measuring.request(
        "kl",
        ref,
        cand,
        out=measuring.run_folder("gate"),
        endpoint=endpoint.settings(),
        confidence=rules.policy.confidence,
        noise_floor=_wants_floor(rules, noise_floor),
        shuffle=shuffle,
    )


def _measured(rules: Policy, request: RunRequest, before: Run | None, *, sequential: bool, quiet: bool) -> GateReport:
    from evalgate.gate.foresight import check_parts

    text_check = partial(check_parts, rules)
    if not sequential:
        run = measure.measured(request, quiet=quiet, text_check=text_check, page=False)
        with _paged(run, quiet=quiet) as verdicts:
            verdicts.append(_judged(rules, run, before))
        return verdicts[0]
    from evalgate.gate.judge import assemble
    from evalgate.gate.sequential import SequentialJudge

    judge = SequentialJudge(rules, candidates=len(request.candidates), seed=request.seed)
    run = measure.measured(request, quiet=quiet, judge=judge, text_check=text_check, page=False)
    with _paged(run, quiet=quiet) as verdicts:
        found = assemble(rules, run, judge.verdicts(), stopped=judge.stopped())
        verdicts.append(with_headlines(found, run.summary))
    return verdicts[0]


@contextmanager
def _paged(run: Run, *, quiet: bool) -> Iterator[list[GateReport]]:
    """Leaves the run's page when the block ends: with the verdict that the block adds, or without where it raises."""
    from evalgate.measure.page import leave_page

    verdicts: list[GateReport] = []
    try:
        yield verdicts
    finally:
        missing = leave_page(run, verdicts[0] if verdicts else None)
        if missing and not quiet:
            say(missing)


def _of_run(rules: Policy, folder: Place, before: Run | None, candidate: str | None, *, sequential: bool) -> GateReport:
    from evalgate.measure.stored import read_run

    stored = read_run(folder)
    return _replayed(rules, stored) if sequential else _judged(rules, stored, before, candidate)


def _judged(rules: Policy, run: Run, baseline: Run | None, candidate: str | None = None) -> GateReport:
    from evalgate.gate.judge import judge

    return with_headlines(judge(rules, run, baseline=baseline, candidate=candidate), run.summary)


def _replayed(rules: Policy, run: Run) -> GateReport:
    """A stored run judged document by document, as if it were measured now."""
    from evalgate.gate.judge import assemble
    from evalgate.gate.sequential import SequentialJudge, replay

    summary = run.summary
    judge = SequentialJudge(rules, candidates=len(summary.comparisons), seed=summary.seed)
    replay(
        judge, run.table, seed=summary.seed, noise_floor=summary.reference.noise_floor if summary.reference else None
    )
    return with_headlines(assemble(rules, run, judge.verdicts(), stopped=judge.stopped()), run.summary)


def _baseline(rules: Policy, folder: Place | None, *, sequential: bool) -> Run | None:
    """The baseline run; None where none is asked for, or where it is optional and there is none yet."""
    from evalgate.measure.stored import read_run

    if sequential and folder is not None:
        raise UsageError(
            "a sequential gate does not score every position of the baseline: leave out --sequential or --baseline"
        )
    optional = rules.policy.baseline == "optional"
    if folder is not None and not (optional and not is_there(folder)):
        return read_run(folder)
    if rules.needs_baseline and not optional:
        raise UsageError(
            "the policy compares with a baseline: name its run folder with --baseline RUN, or leave those rules out "
            "until there is one with --baseline-optional"
        )
    return None


def _wants_floor(rules: Policy, asked: bool | None) -> bool:
    wanted = rules.policy.noise_floor if asked is None else asked
    if rules.needs_floor and not wanted:
        raise UsageError("the policy has a rule against the noise floor: measure it, with --noise-floor")
    return wanted


def _refuse_measuring(ctx: typer.Context) -> None:
    """Refuse every option that says how to measure: a stored run is judged as it is."""
    given = [p for p in ctx.command.params if p.name in MEASURING and options.given(ctx, str(p.name))]
    named = [(p.secondary_opts if ctx.params[str(p.name)] is False else p.opts)[0] for p in given]
    if named:
        raise UsageError(f"--run judges a run that was measured: leave out {', '.join(named)}")
