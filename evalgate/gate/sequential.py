"""Stopping early, honestly: documents in random order, and a verdict that may be looked at after every one of them.

Every rule follows a betting confidence sequence (`stats.sequential`) of one number in [0, clip] per document: its mean,
cut to clip, or for a percentile the share of its positions beyond the limit. Documents count alike, whatever their
length, and the corpus is finite: the verdict is about the mean over its documents. A rule keeps the first verdict that
its sequence gives. A second sequence bounds the share of documents whose mean is above clip, of which a pass says
nothing. A rule with both a min and a max is cut on both sides, so that the mean of what was cut can be beyond a limit
which the true one keeps: such a rule may pass early, and fails only once every document is seen.

With correction = "holm" the error rate is split evenly over rules and candidates (Bonferroni), for Holm's steps need
all verdicts at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np

from evalgate.core import Figure, Limits, Verdict
from evalgate.errors import ScoreError, UsageError
from evalgate.gate.gauges import Gauge, gauge
from evalgate.gate.policy import Policy, Rule
from evalgate.gate.report import CandidateVerdict, RuleVerdict, Stopped
from evalgate.metrics import Scores, split_candidates
from evalgate.stats.sequential import BettingSequence

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass
class _Track:
    """One rule on one candidate while documents come in."""

    gauge: Gauge
    total: int
    confidence: float
    verdict: Verdict = "undecided"
    means: list[float] = field(default_factory=list)
    positions: int = 0

    def __post_init__(self) -> None:
        self.sequence = BettingSequence(clip=self.gauge.clip, confidence=self.confidence, total=self.total)
        self.above = BettingSequence(clip=1.0, confidence=self.confidence, total=self.total)
        self.cut = 0  # documents beyond the clip
        self.decided = self.figure  # the one that gave the verdict

    @property
    def figure(self) -> Figure:
        """What is followed and its interval so far; once every document is seen, their mean itself, uncut."""
        mean = float(np.mean(self.means)) if self.means else None
        interval = self.sequence.interval
        if self.whole:
            interval = interval.between(mean, mean)
        return Figure(mean, interval, n=self.positions, documents=self.sequence.seen)

    @property
    def limits(self) -> Limits:
        """Where the followed mean has to stay."""
        return Limits(self.gauge.least, self.gauge.most)

    @property
    def whole(self) -> bool:
        """Whether every document is seen."""
        return len(self.means) == self.total

    def add(self, scores: Scores) -> None:
        """Take in one document; nothing more once the verdict has fallen, which speaks of those before."""
        if self.verdict != "undecided":
            return
        one = self.gauge
        values = one.values(scores)
        mean = float(values.mean())
        self.positions += len(values)
        beyond = mean > one.clip or (one.cut_below and mean < 0)
        self.cut += beyond
        self.means.append(mean if one.cut_below else max(mean, 0.0))  # rounding may leave a mean of zeros a hair below
        self.sequence.add(max(mean, 0.0))
        self.above.add(float(beyond))
        self.decided = self.figure
        found = self.limits.verdict(self.decided.interval)
        self.verdict = "undecided" if found == "fail" and one.cut_below and not self.whole else found


class SequentialJudge:
    """Judges a policy while a run is measured; `begin`, then `take` tables until it says that all is decided.

    Raises UsageError at once where a rule cannot be followed document by document.
    """

    def __init__(self, policy: Policy, *, candidates: int, seed: int) -> None:
        self._policy = policy
        share = len(policy.rules) * candidates if policy.policy.correction == "holm" else 1
        self._confidence = 1 - (1 - policy.policy.confidence) / share
        self._gauges = [gauge(rule, clip=policy.policy.clip) for rule in policy.rules]
        self._seed = seed
        self._expected: dict[str, int] = {}
        self._domains: dict[str, str] = {}
        self._tie: float | None = None
        self._tracks: dict[str, list[_Track]] = {}
        self._pending: list[pa.Table] = []
        self._done = 0

    def begin(self, expected: Mapping[str, int], *, domains: Mapping[str, str], noise_floor: float | None) -> None:
        """Say what is coming: positions by document, domain by document, and the tie threshold of `flip` (nats).

        Raises:
            UsageError: a rule names a domain that no document has.
        """
        self._expected, self._domains, self._tie = dict(expected), dict(domains), noise_floor
        for one in self._gauges:
            self._total(one.rule)

    def take(self, table: pa.Table) -> bool:
        """Take in rows of the token-score table; True once every candidate's verdict has fallen.

        Documents are judged when they are complete, in the order in which they came.
        """
        import pyarrow as pa

        self._pending.append(table)
        rows = pa.concat_tables(self._pending).unify_dictionaries()
        names = rows.column("document").cast("string")
        counts = {entry["values"]: entry["counts"] for entry in names.value_counts().to_pylist()}
        sides = len(rows.column("candidate").cast("string").unique())
        complete = [name for name in counts if counts[name] == self._expected[name] * sides]
        for name in complete:
            if not self.decided:
                self._judge(_only(rows, names, [name]), name)
        self._pending = [_only(rows, names, [name for name in counts if name not in complete])]
        return self.decided

    @property
    def decided(self) -> bool:
        """Whether every candidate has failed a rule or passed all."""
        return bool(self._tracks) and all(
            _whole([t.verdict for t in tracks]) != "undecided" for tracks in self._tracks.values()
        )

    def stopped(self) -> Stopped:
        """After how many documents the verdict fell."""
        return Stopped(documents=self._done, of=len(self._expected), seed=self._seed)

    def verdicts(self) -> list[CandidateVerdict]:
        """Every candidate's rules, as they stood when they were decided."""
        return [
            CandidateVerdict(
                candidate=name,
                verdict=_whole([t.verdict for t in tracks]),
                rules=[_rule_verdict(track) for track in tracks],
            )
            for name, tracks in self._tracks.items()
        ]

    def _judge(self, rows: pa.Table, document: str) -> None:
        self._done += 1
        for scores in split_candidates(rows, noise_floor=self._tie):
            tracks = self._tracks.setdefault(
                scores.candidate, [_Track(g, self._total(g.rule), self._confidence) for g in self._gauges]
            )
            for track in tracks:
                if track.gauge.rule.domain in (None, self._domains[document]):
                    track.add(scores)

    def _total(self, rule: Rule) -> int:
        if rule.domain is None:
            return len(self._expected)
        total = sum(domain == rule.domain for domain in self._domains.values())
        if not total:
            known = ", ".join(dict.fromkeys(self._domains.values()))
            raise UsageError(f"rule {rule.text!r}: there is no domain {rule.domain!r}: choose one of {known}")
        return total


def replay(judge: SequentialJudge, table: pa.Table, *, seed: int, noise_floor: float | None) -> None:
    """Judge a run that is already measured, its documents in seeded random order, up to the verdict."""
    import pyarrow as pa

    names = table.column("document").cast("string")
    domains = dict(zip(names.to_pylist(), table.column("domain").cast("string").to_pylist(), strict=True))
    sides = len(table.column("candidate").cast("string").unique())
    counts = {entry["values"]: entry["counts"] for entry in names.value_counts().to_pylist()}
    if any(count % sides for count in counts.values()):
        raise ScoreError("the candidates of this run do not have the same positions: judge it without --sequential")
    judge.begin({n: c // sides for n, c in counts.items()}, domains=domains, noise_floor=noise_floor)
    place: dict[str, list[int]] = {}
    for row, name in enumerate(names.to_pylist()):
        place.setdefault(name, []).append(row)
    for name in shuffled(list(place), seed=seed):
        if judge.take(table.take(pa.array(place[name]))):
            return


def shuffled(documents: Sequence[str], *, seed: int) -> list[str]:
    """The documents in the order in which a sequential gate shows them."""
    return [documents[i] for i in np.random.default_rng(seed).permutation(len(documents))]


def _only(rows: pa.Table, names: pa.ChunkedArray, wanted: Sequence[str]) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    return rows.filter(pc.is_in(names, pa.array(wanted, pa.string())))


def _whole(verdicts: Sequence[Verdict]) -> Verdict:
    if "fail" in verdicts:
        return "fail"
    return "undecided" if "undecided" in verdicts else "pass"


def _rule_verdict(track: _Track) -> RuleVerdict:
    one, found = track.gauge, track.decided
    rule, (low, high) = one.rule, _ends(found)
    value = None if one.back is None or found.value is None else one.back(found.value)
    ends = (None, None) if one.back is None else sorted((one.back(low), one.back(high)))
    return RuleVerdict(
        rule=rule.name or rule.text,
        text=rule.text,
        figure=f"{rule.figure}, documents counted alike",
        metric=rule.metric,
        statistic=rule.statistic,
        unit=one.metric.unit,
        verdict=track.verdict,
        reason=_reason(track),
        value=value,
        low=ends[0],
        high=ends[1],
        confidence=track.confidence,
        method=found.interval.method,
        min=rule.min,
        max=rule.max,
        exactness="exact",
        documents=found.documents,
        positions=track.positions,
    )


def _reason(track: _Track) -> str:
    """What decided, how far it reaches, and what the clip leaves unsaid."""
    one, found = track.gauge, track.decided
    (low, high), limit = _ends(found), f"{one.most:.4g}"
    reach, beyond = f"as at most {one.clip:.4g}", "above"
    if one.back is not None and one.rule.max is None:  # followed by the distance to the top of the metric's range
        low, high, limit = one.back(high), one.back(low), f"{one.back(one.most):.4g}"
        reach, beyond = f"as at least {one.back(one.clip):.4g}", "below"
    if isfinite(one.least) and one.back is not None:
        low, high = one.back(low), one.back(high)
        limit = f"{one.back(one.least):.4g} to {one.back(one.most):.4g}"
        reach, beyond = f"as {one.back(0.0):.4g} to {one.back(one.clip):.4g}", "outside"
    open_ = track.verdict == "undecided" and track.limits.verdict(found.interval) == "fail"
    words = {"pass": "stays within", "fail": "is beyond", "undecided": "is beyond" if open_ else "holds"}
    share = "share of positions beyond the limit" if one.back is None else "mean of documents"
    said = (
        f"after {found.documents} of {track.total} documents the {share}, [{low:.4g}, {high:.4g}] at "
        f"{track.confidence * 100:.4g} %, {words[track.verdict]} {limit}"
    )
    if track.whole:
        return said
    _, most = _ends(Figure(None, track.above.interval))
    late = ", and those may lie on either side: it fails only once every document is seen" if open_ else ""
    return (
        f"{said}; a document counts {reach} ({track.cut} were cut), and at most "
        f"{most:.2%} of documents are {beyond} that{late}"
    )


def _ends(figure: Figure) -> tuple[float, float]:
    """Both ends of a betting sequence's interval, neither of which is ever open."""
    low, high = figure.low, figure.high
    if low is None or high is None:
        raise ScoreError("a betting sequence has no open end: report this run")
    return low, high
