"""The gate: a policy's rules on a run's figures become verdicts.

A rule passes when the whole interval is inside its limits and the bound of clipped documents is too (`guarded`), fails
when the interval is wholly outside, and is undecided between. An end of the interval that is unknown or unbounded is
inside nothing and outside nothing.

Several rules share one error rate where the policy asks for it (`family`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from evalgate.core import Limits, Verdict
from evalgate.errors import UsageError, choose
from evalgate.gate.family import decide
from evalgate.gate.figures import Evidence, RuleFigure, baseline_scores, rule_figure
from evalgate.gate.policy import Policy, Rule
from evalgate.gate.reasons import not_applicable, rule_verdict
from evalgate.gate.report import EXIT_CODES, CandidateVerdict, Change, GateReport, Stopped
from evalgate.metrics import Scores, split_candidates

if TYPE_CHECKING:
    from evalgate.store.runs import Run

HEADLINES = (("kl", "mean"), ("kl", "p99"), ("top1_agreement", "mean"), ("nll", "difference"))


def judge(policy: Policy, run: Run, *, baseline: Run | None = None, candidate: str | None = None) -> GateReport:
    """Judge every candidate of a run, or one. baseline: a run of the same positions, for rules and the changes shown.

    Raises:
        UsageError: a rule asks for what the run does not have (names the rule), or there is no such candidate.
        MismatchError: the baseline was measured on other positions. ScoreError: a value that a rule needs is missing.
    """
    floor = run.summary.reference.noise_floor if run.summary.reference else None
    others = {} if baseline is None else {s.candidate: s for s in split_candidates(baseline.table, noise_floor=floor)}
    found: list[Evidence] = []
    candidates = split_candidates(run.table, noise_floor=floor)
    # Comparisons stand in the order in which their candidates appear in the table.
    for scores, comparison in zip(candidates, run.summary.comparisons, strict=True):
        if candidate not in (None, scores.candidate, comparison.candidate.spec):
            continue
        found.append(
            Evidence(
                scores=scores,
                clip=policy.policy.clip,
                unit=policy.policy.unit,
                whole=policy.policy.population == "corpus",
                baseline=baseline_scores(scores, others) if others else None,
                noise=comparison.noise,
                token_texts=run.token_texts,
            )
        )
    if not found:
        named = [c.candidate.spec for c in run.summary.comparisons]
        raise UsageError(f"the run has no candidate {candidate!r}: {choose(candidate, named)}")
    return assemble(policy, run, _judged(policy, found), baseline=baseline)


def _judged(policy: Policy, candidates: Sequence[Evidence]) -> list[CandidateVerdict]:
    """Every rule on every candidate, as one family."""
    settings = policy.policy
    applied = [[rule for rule in policy.rules if _applies(policy, rule, evidence)] for evidence in candidates]
    figures = [[_named_figure(r, evidence) for r in own] for own, evidence in zip(applied, candidates, strict=True)]
    family = [figure for own in figures for figure in own]
    decisions = iter(decide(family, confidence=settings.confidence, correction=settings.correction))
    found = []
    for evidence, own, held in zip(candidates, applied, figures, strict=True):
        judged = {rule: (figure, next(decisions)) for rule, figure in zip(own, held, strict=True)}
        found.append(
            CandidateVerdict(
                candidate=evidence.scores.candidate,
                verdict=worst([decision.verdict for _, decision in judged.values()]),
                rules=[
                    rule_verdict(policy, rule, *judged[rule]) if rule in judged else not_applicable(policy, rule)
                    for rule in policy.rules
                ],
                changes=changes(policy, evidence),
            )
        )
    return found


def _applies(policy: Policy, rule: Rule, evidence: Evidence) -> bool:
    missing = rule.kind.needs == "baseline" and evidence.baseline is None
    return not (missing and policy.policy.baseline == "optional")


def assemble(
    policy: Policy,
    run: Run,
    candidates: Sequence[CandidateVerdict],
    *,
    baseline: Run | None = None,
    stopped: Stopped | None = None,
) -> GateReport:
    """The report of candidates already judged: the worst verdict of their rules, on_undecided applied."""
    summary, settings = run.summary, policy.policy
    verdict = worst([rule.counts_as for candidate in candidates for rule in candidate.rules])
    return GateReport(
        evalgate_version=summary.evalgate_version,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        policy=settings.name,
        policy_hash=policy_hash(policy),
        confidence=settings.confidence,
        correction=settings.correction,
        population=settings.population,
        on_undecided=settings.on_undecided,
        verdict=verdict,
        exit_code=EXIT_CODES[verdict],
        reference=summary.reference.spec if summary.reference else None,
        baseline=str(baseline.place) if baseline is not None and baseline.place else None,
        run=str(run.place) if run.place else None,
        corpus=summary.corpus.name,
        documents=max(c.overall.documents for c in summary.comparisons),
        positions=max(c.overall.positions for c in summary.comparisons),
        candidates=list(candidates),
        sequential=stopped,
        notes=list(summary.notes),
    )


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """fail if any is, else undecided if any is, else pass."""
    order: tuple[Verdict, ...] = ("pass", "undecided", "fail")
    return max(verdicts, key=order.index, default="pass")


def policy_hash(policy: Policy) -> str:
    """xxh3-128 of everything the policy says."""
    import xxhash

    return str(xxhash.xxh3_128_hexdigest(policy.model_dump_json().encode()))


def _named_figure(rule: Rule, evidence: Evidence) -> RuleFigure:
    try:
        return rule_figure(rule, evidence)
    except UsageError as error:
        raise UsageError(f"rule {rule.label!r}: {error.message}", rule=rule.text, **error.context) from error


def changes(policy: Policy, evidence: Evidence) -> list[Change]:
    """The headline figures and those of the policy's own rules, beside the baseline's; empty without a baseline."""
    if evidence.baseline is None:
        return []
    wanted = dict.fromkeys([*HEADLINES, *((r.metric, r.statistic) for r in policy.rules)])
    found = []
    for metric, statistic in wanted:
        change = _change(metric, statistic, evidence, confidence=policy.policy.confidence)
        if change is not None:
            found.append(change)
    return found


def _change(metric: str, statistic: str, evidence: Evidence, *, confidence: float) -> Change | None:
    """One figure beside the baseline's, None where a side does not have it as a plain mean or percentile."""
    baseline = evidence.baseline
    if baseline is None:
        return None
    own = Rule(metric=metric, statistic=statistic, max=0.0)
    difference = Rule(metric=metric, statistic=statistic, max=0.0, against="baseline")
    try:
        here = rule_figure(own, evidence)
        there = rule_figure(own, _swapped(evidence, baseline))
        between = rule_figure(difference, evidence)
    except UsageError:  # not shown is not judged: a rule on it has its own, loud error
        return None
    value, base, change = (f.measure.figure(Limits(), confidence=confidence) for f in (here, there, between))
    if value.value is None or base.value is None or change.value is None:
        return None
    return Change(
        metric=metric,
        statistic=statistic,
        unit=here.metric.unit,
        better=here.metric.better,
        value=value.value,
        baseline=base.value,
        difference=change.value,
        low=change.low,
        high=change.high,
    )


def _swapped(evidence: Evidence, scores: Scores) -> Evidence:
    return Evidence(scores=scores, clip=evidence.clip, unit=evidence.unit)
