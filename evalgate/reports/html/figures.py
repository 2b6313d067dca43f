"""The figures of a report as text: the headline, the candidates side by side, everything, and what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evalgate.core import NOT_APPLICABLE, counted
from evalgate.reports._noise import conditions, noise_rows
from evalgate.reports._numbers import figure_text, plain, unknown
from evalgate.reports._verdicts import explained, rule_text
from evalgate.reports._verdicts import headline as verdict_headline
from evalgate.reports._words import is_noise, label, ordered, sections

if TYPE_CHECKING:
    from evalgate.gate.report import CandidateVerdict, GateReport
    from evalgate.summary import Comparison, Group, Source, Summary

# (metric, statistic, name, what it says) of the figures that people quote, the run's own first.
QUOTED = {
    "kl": (
        ("kl", "mean", "mean KL", "nats lost per token"),
        ("kl", "p99", "99 % KL", "one token in a hundred loses more"),
        ("top1_agreement", "mean", "same top-1", "picks the reference's token"),
        ("delta_prob", "rms", "RMS Δp", "typical change of the token's probability"),
        ("perplexity", "ratio", "perplexity ratio", "candidate over reference"),
    ),
    "agree": (
        ("top1_agreement", "mean", "same top-1", "picks the reference's token"),
        ("flip", "mean", "flips above noise", "other choices that are not ties"),
        ("regret", "mean", "mean regret", "what other choices cost, nats"),
        ("perplexity", "ratio", "perplexity ratio", "candidate over reference"),
    ),
    "ppl": (
        ("perplexity", "candidate", "perplexity", "exp of the mean NLL"),
        ("bits_per_byte", "candidate", "bits per byte", "comparable across tokenizers"),
        ("nll", "mean", "mean NLL", "nats per token"),
        ("entropy", "candidate", "mean entropy", "nats that the model states"),
    ),
}
_EXACTNESS = {
    "exact": "exact: both whole distributions were seen at every position",
    "estimated": "estimated: unbiased, with an error of its own",
    "bounded": "bounded: only an interval is known",
}


@dataclass(frozen=True)
class Quoted:
    """One figure of the headline. exactness: the word, and `said` what it means. noise: it may be noise alone."""

    name: str
    about: str
    value: str
    interval: str
    exactness: str
    said: str
    noise: bool


@dataclass(frozen=True)
class Row:
    """A figure with its interval and what is known of its noise."""

    name: str
    value: str
    interval: str
    exactness: str
    mark: str


def quoted(summary: Summary, comparison: Comparison) -> list[Quoted]:
    """The figures that people quote, as far as the run has them."""
    found = (_quoted(summary, comparison, comparison.overall, *wanted) for wanted in QUOTED[summary.kind])
    return [one for one in found if one is not None]


def _quoted(
    summary: Summary, comparison: Comparison, group: Group, metric: str, statistic: str, name: str, about: str
) -> Quoted | None:
    found = group.metrics.get(metric)
    if found is None:
        return None
    figure, low, high = (found.statistics.get(f"{statistic}{end}") for end in ("", "_low", "_high"))
    shown = figure or low
    if shown is None:
        return None
    text = figure_text(shown.value, shown.interval, unit=found.unit, documents=group.documents)
    value, interval = text.value, text.interval
    if figure is None:
        value = f"≥ {value}"
        if high is not None:
            top = figure_text(high.value, high.interval, unit=found.unit, documents=group.documents)
            value, interval = f"{text.value} to {top.value}", f"{text.interval} to {top.interval}"
    return Quoted(
        name=name,
        about=about,
        value=value,
        interval=interval,
        exactness=found.exactness,
        said=_EXACTNESS[found.exactness],
        noise=figure is not None and is_noise(found, statistic, load_floor(summary, comparison)),
    )


def load_floor(summary: Summary, comparison: Comparison) -> float | None:
    """Nats of KL: the larger of what the two sides showed when they were loaded; None where neither was checked."""
    if summary.reference is None:
        return None
    floors = [side.kl_floor for side in (summary.reference, comparison.candidate) if side.kl_floor is not None]
    return max(floors, default=None)


def everything(summary: Summary, comparison: Comparison) -> Iterator[tuple[str, list[Row]]]:
    """Every figure of one candidate, under the headings of the terminal's block."""
    group, floor = comparison.overall, load_floor(summary, comparison)
    for name, metrics in sections(summary.kind, group):
        rows = []
        for metric in metrics:
            for statistic in ordered(metric):
                figure = metric.statistics[statistic]
                text = figure_text(figure.value, figure.interval, unit=metric.unit, documents=group.documents)
                interval = "" if statistic in ("max", "min", "sampling_se") else text.interval
                mark = "not distinguishable from noise" if is_noise(metric, statistic, floor) else ""
                rows.append(Row(label(metric, statistic), text.value, interval, metric.exactness, mark))
        yield name, rows
    if comparison.noise is not None:
        rows = [
            Row(f"{one.name}, above its floor of {one.floor}", one.excess, one.interval, "", "")
            for one in noise_rows(group, comparison.noise)
        ]
        yield f"Above the noise floor ({conditions(comparison.noise)})", rows


def intervals(summary: Summary) -> str:
    """What the intervals are."""
    groups = [comparison.overall for comparison in summary.comparisons]
    figures = [f for group in groups for metric in group.metrics.values() for f in metric.statistics.values()]
    known = [figure for figure in figures if figure.interval.known]
    if not known:
        return unknown(groups[0].documents if groups else 0)
    return f"{known[0].confidence * 100:.6g} % {known[0].label or 'over documents'}"


def measured(summary: Summary) -> list[tuple[str, str]]:
    """What was measured, on what, when."""
    corpus = summary.corpus
    limit = "" if corpus.limit is None else f", limited to {counted(corpus.limit, 'window')}"
    facts = [
        ("Text", f"{corpus.name}: {counted(corpus.documents, 'document')}, {counted(corpus.tokens, 'token')}"),
        ("Windows", f"{corpus.window_preset}, context {corpus.context}, stride {corpus.stride}{limit}"),
    ]
    if summary.comparisons:
        group = summary.comparisons[0].overall
        within = f"{counted(group.windows, 'window')} of {counted(group.documents, 'document')}"
        facts.append(("Scored", f"{counted(group.positions, 'position')} in {within}, {counted(group.bytes, 'byte')}"))
    facts.append(("Intervals", intervals(summary)))
    if summary.reference is not None:
        facts.append(("Reference", source(summary.reference)))
    side = "Candidate" if summary.reference is not None else "Model"
    facts += [(side, source(comparison.candidate)) for comparison in summary.comparisons]
    if corpus.skipped:
        named = "; ".join(f"{one.name} ({one.reason})" for one in corpus.skipped[:5])
        more = f"; and {len(corpus.skipped) - 5} more" if len(corpus.skipped) > 5 else ""
        facts.append(("Skipped", f"{counted(len(corpus.skipped), 'document')}: {named}{more}"))
    facts.append(("Made", f"{summary.created}, in {summary.seconds:.1f} s, by evalgate {summary.evalgate_version}"))
    return facts


def source(one: Source) -> str:
    """A model or endpoint, and everything about it that changes a number."""
    named = (
        ("weights", one.dtype),
        ("compute", one.compute_dtype + (f" ({one.compute_reason})" if one.compute_reason else "")),
        ("logits", one.logits_dtype),
        ("loaded", one.load_mode),
        ("scheme", one.scheme),
        ("backend", one.backend),
        ("attention", one.attention),
        ("hash", one.weights_hash[:16]),
    )
    floor = "not measured"
    if one.noise_floor is not None:
        floor = f"{plain(one.noise_floor)} nats of log-probability"
        floor += "" if one.kl_floor is None else f", {plain(one.kl_floor)} nats of KL"
    parts = [one.kind, *(f"{name} {value}" for name, value in named if value), f"noise floor {floor}"]
    return f"{one.spec}: {', '.join(parts)}"


def rules(candidate: CandidateVerdict) -> list[dict[str, Any]]:
    """A candidate's rules with their verdicts."""
    found = []
    for rule in candidate.rules:
        text = rule_text(rule)
        found.append(
            {
                "name": rule.rule if rule.rule == rule.text else f"{rule.rule}: {rule.figure}",
                "verdict": rule.verdict,
                "kind": "na" if rule.verdict == NOT_APPLICABLE else rule.verdict,
                "value": text.value,
                "interval": text.interval,
                "limit": text.limit.replace(">=", "≥").replace("<=", "≤"),
                "reason": " ".join(rule.reason.split()) if explained(rule) else "",
            }
        )
    return found


def verdict_sentence(report: GateReport) -> str:
    """The verdict in one line, without the word itself."""
    return verdict_headline(report).partition(": ")[2]


def listed_files(manifest: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Name, bytes and SHA-256 of the files that a manifest lists."""
    files = manifest.get("files", {})
    return [(name, f"{entry['bytes']:,}", str(entry["sha256"])) for name, entry in files.items()]


def side_by_side(found: Sequence[Sequence[Quoted]]) -> list[str]:
    """The names of the figures that some candidate has, in their order."""
    return list(dict.fromkeys(one.name for many in found for one in many))
