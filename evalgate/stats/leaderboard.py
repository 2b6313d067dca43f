"""From the runs of a sweep to its leaderboard: places and ties, sizes, and who is best for its size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from evalgate.core import VERSION
from evalgate.errors import MismatchError
from evalgate.leaderboard import Entry, Leaderboard, Quantity, Size
from evalgate.metrics import Scores, split_candidates
from evalgate.stats.ranking import ranking_of

if TYPE_CHECKING:
    from evalgate.store.runs import Run
    from evalgate.summary import Group, Place, RankedPair, Source

METRIC = "kl"
GIVEN = "as given"


@dataclass(frozen=True)
class Contender:
    """One candidate of a sweep.

    run: what was measured, None where nothing could be, and `reason` says why. folder: of the run, relative to the
    sweep's. bytes: of its weights as the user says, None = as counted. speed: tokens a second, None = not known.
    """

    name: str
    spec: str
    run: Run | None = None
    reason: str = ""
    folder: str | None = None
    bytes: int | None = None
    speed: float | None = None


def leaderboard(
    contenders: Sequence[Contender], *, confidence: float, seconds: float, notes: Sequence[str] = ()
) -> Leaderboard:
    """The document of a sweep. seconds: of all its measurements. notes: what a reader must know beside the figures.

    Raises ValueError where no candidate was measured.
    """
    measured = [one for one in contenders if one.run is not None]
    if not measured:
        raise ValueError("no candidate was measured")
    places, pairs, unranked = _ranked(measured, confidence)
    entries = [_entry(one, places.get(one.name)) for one in contenders]
    entries = [entry.model_copy(update={"front": _on_front(entry, entries)}) for entry in entries]
    first = measured[0].run
    assert first is not None and first.summary.reference is not None  # a sweep has a reference
    group = first.summary.comparisons[0].overall
    return Leaderboard(
        evalgate_version=VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seed=first.summary.seed,
        confidence=confidence,
        reference=first.summary.reference,
        corpus=first.summary.corpus,
        positions=group.positions,
        windows=group.windows,
        documents=group.documents,
        entries=sorted(entries, key=_order),
        pairs=pairs,
        seconds=seconds,
        versions=first.summary.versions,
        notes=[*notes, *unranked, *_shared_notes(measured)],
    )


def _ranked(measured: Sequence[Contender], confidence: float) -> tuple[dict[str, Place], list[RankedPair], list[str]]:
    """Places by name, the pairs, and a note for each candidate that was scored at other positions than the first."""
    sides = [_scores(one) for one in measured]
    alike, notes = [], []
    for side in sides:
        try:
            ranking_of([sides[0], side], METRIC, confidence=confidence) if side is not sides[0] else None
        except MismatchError:
            notes.append(f"{side.candidate} was scored at other positions than {sides[0].candidate} and is not ranked")
        else:
            alike.append(side)
    found = ranking_of(alike, METRIC, confidence=confidence)
    return {place.candidate: place for place in found.places}, list(found.pairs), notes


def _scores(one: Contender) -> Scores:
    """The scores of a candidate under the name that the sweep has for it: two endpoints may serve one name."""
    run = one.run
    assert run is not None
    floor = run.summary.reference.noise_floor if run.summary.reference else None
    (scores,) = split_candidates(run.table, noise_floor=floor)
    return replace(scores, candidate=one.name)


def _entry(one: Contender, place: Place | None) -> Entry:
    if one.run is None:
        return Entry(name=one.name, spec=one.spec, reason=one.reason, size=_size(None, one.bytes))
    comparison = one.run.summary.comparisons[0]
    group = comparison.overall
    return Entry(
        name=one.name,
        spec=one.spec,
        place=place,
        run=one.folder,
        source=comparison.candidate,
        kl=_quantity(group, METRIC, "mean"),
        top1=_quantity(group, "top1_agreement", "mean"),
        ratio=_quantity(group, "perplexity", "ratio"),
        size=_size(comparison.candidate, one.bytes),
        speed=one.speed,
    )


def _quantity(group: Group, metric: str, statistic: str) -> Quantity | None:
    found = group.metrics.get(metric)
    if found is None:
        return None
    value, low, high = (found.statistics.get(f"{statistic}{end}") for end in ("", "_low", "_high"))
    if value is None and low is None:
        return None
    return Quantity(value=value, low=low, high=high, exactness=found.exactness)


def _size(source: Source | None, given: int | None) -> Size | None:
    """The size of a source's weights: what the user gave, else what was counted where it was loaded."""
    facts = {} if source is None else source.extra
    parameters = int(facts["parameters"]) if facts.get("parameters", "").isdigit() else None
    counted = int(facts["weights_bytes"]) if facts.get("weights_bytes", "").isdigit() else None
    total = counted if given is None else given
    if not total:
        return None
    types = {}
    if given is None:
        for part in filter(None, facts.get("weights_types", "").split(", ")):
            kind, _, size = part.rpartition(" ")
            types[kind] = int(size)
    return Size(
        bytes=total,
        parameters=parameters,
        bits=8 * total / parameters if parameters else None,
        counted=facts.get("weights_counted", GIVEN) if given is None else GIVEN,
        types=types,
    )


def _on_front(entry: Entry, entries: Sequence[Entry]) -> bool:
    """Whether no other candidate is at least as small and as close, and better in one of the two."""
    mine = _position(entry)
    if mine is None:
        return False
    others = [found for other in entries if other is not entry and (found := _position(other)) is not None]
    return not any(a <= mine[0] and b <= mine[1] and (a, b) != mine for a, b in others)


def _position(entry: Entry) -> tuple[int, float] | None:
    """Bytes and mean KL; None where one is not known."""
    value = entry.kl.value if entry.kl is not None else None
    return None if value is None or entry.size is None else (entry.size.bytes, value.value)


def _order(entry: Entry) -> tuple[bool, float]:
    """Measured ones first, by mean KL or what it is at least."""
    least = None if entry.kl is None else entry.kl.least
    return (least is None, 0.0 if least is None else least.value)


def _shared_notes(measured: Sequence[Contender]) -> list[str]:
    """The notes of the runs, once each; those of one candidate alone say whose they are."""
    by_note: dict[str, list[str]] = {}
    for one in measured:
        for note in one.run.summary.notes if one.run is not None else ():
            by_note.setdefault(note, []).append(one.name)
    every = len(measured)
    return [note if len(names) == every else f"{', '.join(names)}: {note}" for note, names in by_note.items()]
