"""Stopping early, honestly: documents in random order, and a verdict that may be looked at after every one of them.

Every rule on every candidate is a `Track`, which keeps the first verdict that its evidence gives. The question is that
of the fixed gate: the mean over positions, of documents like these or, with population = "corpus", of these documents.

With correction = "holm" the error rate is divided by the number of rules and candidates that are left to decide, after
every document and for passes and fails apart (Holm 1979): evidence that may be looked at at any time may be stepped
down at any time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Figure, Verdict, counted
from evalgate.errors import ScoreError, UsageError, choose
from evalgate.gate.following import Followed, followed
from evalgate.gate.judge import worst
from evalgate.gate.policy import Policy, Rule
from evalgate.gate.report import CandidateVerdict, RuleVerdict, Stopped
from evalgate.gate.track import Track
from evalgate.metrics import split_candidates

if TYPE_CHECKING:
    import pyarrow as pa


class SequentialJudge:
    """Judges a policy while a run is measured; `begin`, then `take` tables until it says that all is decided.

    Raises UsageError at once where a rule cannot be followed document by document.
    """

    def __init__(self, policy: Policy, *, candidates: int, seed: int) -> None:
        self._policy, self._settings = policy, policy.policy
        self._count = len(policy.rules) * candidates
        self._followed = [followed(rule) for rule in policy.rules]
        self._seed = seed
        self._expected: dict[str, int] = {}
        self._domains: dict[str, str] = {}
        self._tie: float | None = None
        self._tracks: dict[str, list[Track]] = {}
        self._pending: list[pa.Table] = []
        self._done = 0

    def begin(self, expected: Mapping[str, int], *, domains: Mapping[str, str], noise_floor: float | None) -> None:
        """Say what is coming: positions by document, domain by document, and the tie threshold of `flip` (nats).

        Raises:
            UsageError: a rule names a domain that no document has.
        """
        self._expected, self._domains, self._tie = dict(expected), dict(domains), noise_floor
        for one in self._followed:
            self._sizes(one.rule)

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
            worst([t.verdict for t in tracks]) != "undecided" for tracks in self._tracks.values()
        )

    def stopped(self) -> Stopped:
        """After how many documents the verdict fell."""
        return Stopped(documents=self._done, of=len(self._expected), seed=self._seed)

    def verdicts(self) -> list[CandidateVerdict]:
        """Every candidate's rules, as they stood when they were decided."""
        return [
            CandidateVerdict(
                candidate=name,
                verdict=worst([t.verdict for t in tracks]),
                rules=[_rule_verdict(self._policy, track) for track in tracks],
            )
            for name, tracks in self._tracks.items()
        ]

    def _judge(self, rows: pa.Table, document: str) -> None:
        self._done += 1
        for scores in split_candidates(rows, noise_floor=self._tie):
            tracks = self._tracks.setdefault(scores.candidate, [self._track(one) for one in self._followed])
            for track in tracks:
                if track.followed.rule.domain in (None, self._domains[document]):
                    track.add(scores)
        self._settle()

    def _track(self, one: Followed) -> Track:
        settings = self._settings
        return Track(one, self._sizes(one.rule), settings.clip, settings.population == "corpus")

    def _settle(self) -> None:
        """Give every verdict that the evidence so far allows, stepping down until there is none."""
        tracks = [track for own in self._tracks.values() for track in own]
        while True:
            given = [self._settled(track, tracks) for track in tracks if track.verdict == "undecided" and track.seen]
            if not any(given):
                break
        for track in tracks:
            if track.verdict == "undecided":
                track.error = self._error(tracks, "pass")

    def _settled(self, track: Track, tracks: Sequence[Track]) -> bool:
        passing, failing = self._error(tracks, "pass"), self._error(tracks, "fail")
        if track.fails(failing):
            track.settle("fail", failing)
        elif track.passes(passing):
            track.settle("pass", passing)
        return track.verdict != "undecided"

    def _error(self, tracks: Sequence[Track], verdict: Verdict) -> float:
        """The error rate at which the next verdict of this kind may fall."""
        left = self._count - sum(track.verdict == verdict for track in tracks)
        share = max(left, 1) if self._settings.correction == "holm" else 1
        return (1 - self._settings.confidence) / share

    def _sizes(self, rule: Rule) -> NDArray[np.float64]:
        """Positions of every document that the rule speaks of."""
        counts = [n for name, n in self._expected.items() if rule.domain in (None, self._domains[name])]
        if not counts:
            known = dict.fromkeys(self._domains.values())
            raise UsageError(f"rule {rule.text!r}: there is no domain {rule.domain!r}: {choose(rule.domain, known)}")
        return np.array(counts, dtype=np.float64)


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


def _rule_verdict(policy: Policy, track: Track) -> RuleVerdict:
    rule, found = track.followed.rule, track.figure
    shown = not track.followed.share
    return RuleVerdict(
        rule=rule.label,
        text=rule.text,
        figure=rule.figure,
        metric=rule.metric,
        statistic=rule.statistic,
        unit=track.followed.metric.unit,
        verdict=track.verdict,
        on_undecided=policy.settled(rule, "undecided"),
        reason=_reason(track, found),
        value=found.value if shown else None,
        low=found.low if shown else None,
        high=found.high if shown else None,
        confidence=found.interval.confidence,
        method=found.interval.method,
        min=rule.min,
        max=rule.max,
        exactness="exact",
        documents=len(track.seen),
        positions=int(sum(track.seen)),
    )


def _reason(track: Track, found: Figure) -> str:
    """What decided, and what a pass leaves unsaid."""
    limits = track.followed.limits
    limit = " to ".join(f"{x:.4g}" for x in (limits.low, limits.high) if x is not None)
    what = "share of positions beyond the limit" if track.followed.share else track.followed.rule.figure
    ends = ", ".join("open" if x is None else f"{x:.4g}" for x in (found.low, found.high))
    words = {"pass": "stays within", "fail": "is beyond", "undecided": "does not settle"}[track.verdict]
    said = (
        f"after {len(track.seen)} of {counted(len(track.sizes), 'document')} the {what}, [{ends}] at "
        f"{found.interval.confidence * 100:.4g} %, {words} {limit}"
    )
    left = track.reservation() if track.verdict == "pass" else ""
    return f"{said}; {left}" if left else said
