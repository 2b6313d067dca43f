"""The gate: a policy's rules on a run's figures become verdicts.

A rule passes when the whole interval is inside its limits and the bound of clipped documents is too (`guarded`), fails
when the interval is wholly outside, and is undecided between. An end of the interval that is unknown or unbounded is
inside nothing and outside nothing.

With correction = "holm" the verdicts of all rules on all candidates hold together: with probability `confidence` none
of them is wrong. Passes and fails are two families with half the error rate each (a two-sided interval splits it
anyhow), and each is stepped down (Holm 1979): all rules are held against intervals at 1 - (1 - confidence) / n; those
decided leave, and the n that are left are tried again at their own, lower confidence. Baselines and noise floors are
inside that level: a difference from a baseline has one interval, and a floor shares the error rate with the figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from evalgate.core import Figure, Limits, Verdict
from evalgate.errors import UsageError
from evalgate.gate.figures import Evidence, RuleFigure, baseline_scores, rule_figure
from evalgate.gate.measures import verdict_of
from evalgate.gate.policy import Policy, Rule
from evalgate.gate.report import EXIT_CODES, CandidateVerdict, Change, GateReport, RuleVerdict, Stopped
from evalgate.metrics import Scores, split_candidates
from evalgate.stats.rare import FEW
from evalgate.stats.units import FEWEST_WINDOWS

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
                seed=run.summary.seed,
                clip=policy.policy.clip,
                unit=policy.policy.unit,
                whole=policy.policy.population == "corpus",
                baseline=baseline_scores(scores, others) if others else None,
                noise=comparison.noise,
                token_texts=run.token_texts,
            )
        )
    if not found:
        named = ", ".join(c.candidate.spec for c in run.summary.comparisons)
        raise UsageError(f"the run has no candidate {candidate!r}: name one of {named}")
    return assemble(policy, run, _judged(policy, found), baseline=baseline)


def _judged(policy: Policy, candidates: Sequence[Evidence]) -> list[CandidateVerdict]:
    """Every rule on every candidate, as one family."""
    settings = policy.policy
    held = [(rule, _named_figure(rule, evidence)) for evidence in candidates for rule in policy.rules]
    figures = [figure for _, figure in held]
    decisions = decide(figures, confidence=settings.confidence, correction=settings.correction)
    verdicts = [rule_verdict(rule, figure, decision) for (rule, figure), decision in zip(held, decisions, strict=True)]
    count = len(policy.rules)
    rules = [verdicts[i : i + count] for i in range(0, len(verdicts), count)]
    return [
        CandidateVerdict(
            candidate=evidence.scores.candidate,
            verdict=worst([r.verdict for r in own]),
            rules=own,
            changes=changes(policy, evidence),
        )
        for evidence, own in zip(candidates, rules, strict=True)
    ]


def assemble(
    policy: Policy,
    run: Run,
    candidates: Sequence[CandidateVerdict],
    *,
    baseline: Run | None = None,
    stopped: Stopped | None = None,
) -> GateReport:
    """The report of candidates already judged: their worst verdict, on_undecided applied."""
    summary, settings = run.summary, policy.policy
    verdict = worst([c.verdict for c in candidates])
    if verdict == "undecided":
        verdict = settings.on_undecided
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
        baseline=str(baseline.folder) if baseline is not None and baseline.folder else None,
        run=str(run.folder) if run.folder else None,
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
    return max(verdicts, key=order.index)


def policy_hash(policy: Policy) -> str:
    """xxh3-128 of everything the policy says."""
    import xxhash

    return str(xxhash.xxh3_128_hexdigest(policy.model_dump_json().encode()))


@dataclass(frozen=True)
class Decision:
    """A rule's verdict and the figure whose interval gave it."""

    verdict: Verdict
    figure: Figure


def decide(figures: Sequence[RuleFigure], *, confidence: float, correction: Literal["none", "holm"]) -> list[Decision]:
    """One decision per figure, corrected for their number where asked."""
    if correction == "none":
        return [_decision(figure, confidence) for figure in figures]
    passes = _stepped(figures, "pass", confidence)
    fails = _stepped(figures, "fail", confidence)
    first = 1 - (1 - confidence) / max(1, len(figures) - len(passes), len(figures) - len(fails))
    return [
        fails.get(i) or passes.get(i) or Decision("undecided", figure.measure.figure(figure.limits, confidence=first))
        for i, figure in enumerate(figures)
    ]


def _decision(figure: RuleFigure, confidence: float) -> Decision:
    found = figure.measure.figure(figure.limits, confidence=confidence)
    return Decision(verdict_of(figure.measure, figure.limits, found), found)


def _stepped(figures: Sequence[RuleFigure], wanted: Verdict, confidence: float) -> dict[int, Decision]:
    """The figures that Holm's procedure decides in one direction, by index."""
    decided: dict[int, Decision] = {}
    while len(decided) < len(figures):
        level = 1 - (1 - confidence) / (len(figures) - len(decided))
        left = {i: _decision(f, level) for i, f in enumerate(figures) if i not in decided}
        now = {i: decision for i, decision in left.items() if decision.verdict == wanted}
        if not now:
            break
        decided |= now
    return decided


def _named_figure(rule: Rule, evidence: Evidence) -> RuleFigure:
    try:
        return rule_figure(rule, evidence)
    except UsageError as error:
        raise UsageError(
            f"rule {rule.name or rule.text!r}: {error.message}", rule=rule.text, **error.context
        ) from error


def rule_verdict(rule: Rule, figure: RuleFigure, decision: Decision) -> RuleVerdict:
    """A decision as the report holds it."""
    found, interval = decision.figure, decision.figure.interval
    return RuleVerdict(
        rule=rule.name or rule.text,
        text=rule.text,
        figure=rule.figure,
        metric=rule.metric,
        statistic=rule.statistic,
        unit="ratio" if rule.max_ratio is not None else figure.metric.unit,
        verdict=decision.verdict,
        reason=_reason(figure, decision),
        value=found.value,
        low=interval.low,
        high=interval.high,
        confidence=interval.confidence,
        method=interval.method,
        label=interval.label,
        min=figure.limits.low,
        max=figure.limits.high,
        exactness=figure.exactness,
        documents=figure.documents,
        positions=figure.positions,
    )


def _reason(figure: RuleFigure, decision: Decision) -> str:
    """One sentence on why the verdict is what it is."""
    found = decision.figure
    interval = f"{found.interval.confidence * 100:.4g} % interval"
    if decision.verdict == "pass":
        left = figure.measure.reservation(figure.limits, confidence=found.interval.confidence)
        return f"the whole {interval} is inside the limit" + (f"; {left}" if left else "")
    if decision.verdict == "fail":
        return f"the whole {interval} is outside the limit"
    if figure.limits.verdict(found.interval) == "pass":
        left = figure.measure.reservation(figure.limits, confidence=found.interval.confidence)
        return f"the whole {interval} is inside the limit, but {left}: measure more documents"
    if not found.interval.known:
        return (
            f"{figure.documents} document gives no interval: measure at least 2, or {FEWEST_WINDOWS} windows of it "
            'with unit = "batches" in the policy'
        )
    if figure.statistic.kind == "percentile" and not found.interval.closed:
        return f"the sample does not support an end of the {interval} on that side: measure more documents"
    if found.alike:
        n = figure.documents
        few = f"there are only {n} documents" if n < FEW else f"fewer than {FEW} of {n} documents differ"
        return f"{few}, too few to rule out that another is far off ({interval}): measure more"
    if figure.exactness == "bounded":
        return f"only bounds are known, and their {interval} does not settle the limit"
    return f"the {interval} holds the limit: measure more documents (`evalgate plan` says how many)"


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
    return Evidence(scores=scores, seed=evidence.seed, clip=evidence.clip, unit=evidence.unit)
