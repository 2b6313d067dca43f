"""Several candidates against one reference: measured together where they can be, ranked, and resumed.

Candidates that are loaded here are scored by one server beside their reference, which runs once for all of them. What
cannot be loaded, or not be compared, is left out with its reason; what does not fit into memory beside the others is
measured in a further round. A measurement that fails for one candidate is repeated in halves until that one is found.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalgate.core import VERSION
from evalgate.errors import EvalgateError, InputError, Interrupted, UsageError
from evalgate.measure.checks import check_recorded, check_request
from evalgate.measure.cutting import read_text
from evalgate.measure.group import GroupMeasurement
from evalgate.measure.kinds import measurement_of
from evalgate.measure.kinds.lenient import LenientMeasurement, NothingLeft, ReferenceFailed
from evalgate.measure.page import leave_page
from evalgate.measure.recordings import is_recorded
from evalgate.measure.request import Observer, RunRequest, silent
from evalgate.measure.run import carry_out
from evalgate.measure.stored import read_run
from evalgate.specs import SourceSpec
from evalgate.store import sweeps
from evalgate.store.remote import Url
from evalgate.store.sweeps import Done, Progress

if TYPE_CHECKING:
    from evalgate.store.runs import Run

_OWN = ("candidates", "out", "resume", "overwrite", "kind", "reference", "endpoint", "data")  # not `inputs` by name
_WHERE = ("ray", "workers", "num_cpus", "num_gpus", "cache")  # where it is computed changes nothing that is measured


@dataclass(frozen=True)
class Candidate:
    """One candidate of a sweep. name: what it is called. bytes: of its weights, where the user says; None = counted."""

    source: SourceSpec
    name: str
    bytes: int | None = None


@dataclass(frozen=True)
class SweepRequest:
    """A sweep to be made.

    run: the request for a run of all candidates; its `out` is the sweep's folder, and its `resume` says whether what is
    done already is taken over. candidates: those of the request, with their names.
    """

    run: RunRequest
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Measured:
    """What a sweep measured.

    runs: by spec, its run. reasons: by spec, why a candidate could not be measured. speeds: by spec, tokens a second.
    seconds: of all measurements, those of earlier commands included.
    """

    runs: dict[str, Run]
    reasons: dict[str, str]
    speeds: dict[str, float]
    seconds: float


@dataclass
class _Work:
    """The state of one sweep while it runs."""

    request: SweepRequest
    folder: Path
    progress: Progress
    watch: Observer
    runs: dict[str, Run] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def folder_of(run: RunRequest) -> Path | None:
    """The sweep's folder, None = not named. Raises UsageError for a URL."""
    if isinstance(run.out, Url):
        raise UsageError(f"--out {run.out} is a URL, and a sweep keeps in its folder what is done: give a folder here")
    return run.out


def check_sweep(request: SweepRequest) -> None:
    """Refuse what no sweep can honour, before anything is read. Raises UsageError."""
    if request.run.reference is None:
        raise UsageError("a sweep needs a reference: name one with --ref")
    if request.run.data == "-":
        raise UsageError("a sweep may read its text more than once: give a file, not standard input")
    folder_of(request.run)
    check_request(replace(request.run, out=None))
    if is_recorded(request.run.reference):
        check_recorded(request.run, None)


def inputs_of(request: RunRequest, watch: Observer) -> dict[str, Any]:
    """Everything that all runs of a sweep share: a sweep is resumed under the same inputs only.

    Raises the errors of evalgate.corpora.
    """
    options = {f.name: getattr(request, f.name) for f in fields(request) if f.name not in (*_OWN, *_WHERE)}
    options["budget"] = None  # how much may be asked in one go changes no number
    text = "recorded" if is_recorded(request.reference) else read_text(request, watch).hash
    return {
        "reference": [str(request.reference_spec), _files(request.reference)],
        "text": text,
        "options": options,
        "endpoint": request.endpoint.public(),
        "evalgate": VERSION,
    }


def measure(request: SweepRequest, inputs: Mapping[str, Any], observer: Observer | None = None) -> Measured:
    """Measure what is not done yet. The folder holds the runs afterwards, and what there is if it is interrupted.

    inputs: as `inputs_of` says. Raises UsageError and InputError for what concerns all candidates, ReferenceFailed
    where the reference cannot be loaded.
    """
    watch, run = observer or silent(), request.run
    folder = folder_of(run)
    if folder is None:
        raise UsageError("a sweep needs a folder for its runs: name one with --out")
    sweeps.check_sweep_target(folder, inputs, overwrite=run.overwrite)
    found = sweeps.read_progress(folder)
    if run.overwrite or not run.resume or found is None or found.inputs != dict(inputs):
        sweeps.clear(folder)
        found = Progress(inputs=dict(inputs))
    work = _Work(request, folder, found, watch)
    _take_over(work)
    sweeps.write_progress(folder, work.progress)
    (folder / sweeps.DOCUMENT).unlink(missing_ok=True)  # it is of fewer candidates, or will be written again
    rounds = _rounds(run, [c for c in run.candidates if c.spec not in work.runs])
    while rounds:
        rounds = [*_one_round(work, rounds[0]), *rounds[1:]]
    speeds = {spec: done.speed for spec, done in work.progress.done.items() if done.speed is not None}
    return Measured(work.runs, work.reasons, speeds, work.progress.seconds)


def _take_over(work: _Work) -> None:
    """The candidates that an earlier command measured, if their files and their runs are as they were."""
    wanted = {candidate.source.spec: candidate.source for candidate in work.request.candidates}
    for spec, done in list(work.progress.done.items()):
        source = wanted.get(spec)
        if source is None:
            continue  # its run stays for a later command that names it again
        try:
            if done.files != _files(source):
                raise InputError(f"{spec} has changed")
            work.runs[spec] = read_run(work.folder / done.run)
        except EvalgateError:
            del work.progress.done[spec]
    if work.runs:
        work.watch.stage(f"{len(work.runs)} of {len(wanted)} candidates were measured before")


def _rounds(run: RunRequest, left: Sequence[SourceSpec]) -> list[list[SourceSpec]]:
    """The measurements to be made, each with its candidates.

    A reference that is asked (an endpoint) is asked once for all of them. Where it is recorded it costs nothing, and an
    endpoint as a candidate may fail by itself: each is measured alone then.
    """
    reference = run.reference
    if not left or reference is None:
        return []
    if is_recorded(reference):
        return [[candidate] for candidate in left]
    if reference.remote:
        return [list(left)]
    here = [candidate for candidate in left if not candidate.remote]
    return [*([here] if here else []), *([candidate] for candidate in left if candidate.remote)]


def _one_round(work: _Work, group: list[SourceSpec]) -> list[list[SourceSpec]]:
    """Measure a group; returns the groups that are left of it."""
    run, began = work.request.run, time.monotonic()
    taken = [Path(done.run).name for done in work.progress.done.values()]
    names = {candidate.source.spec: candidate.name for candidate in work.request.candidates}
    places = sweeps.folder_names([names[c.spec] for c in group], taken)
    folders = {c.spec: work.folder / sweeps.RUNS / place for c, place in zip(group, places, strict=True)}
    one = replace(
        run,
        candidates=tuple(group),
        out=None,
        context=run.context if is_recorded(run.reference) else work.progress.context or run.context,
    )
    lenient = not is_recorded(one.reference) and not any(model.remote for model in one.models)
    inner = LenientMeasurement(one) if lenient else measurement_of(one)
    measurement = GroupMeasurement(inner, folders)
    try:
        runs = carry_out(measurement, work.watch)
    except (InputError, Interrupted, ReferenceFailed):
        raise
    except NothingLeft:
        runs = []
    except EvalgateError as error:
        if lenient and isinstance(error, UsageError):  # of the windows, which are the same for all
            raise
        if len(group) == 1:
            work.reasons[group[0].spec] = error.message
            return []
        half = len(group) // 2
        work.watch.stage(f"measuring in two parts, for together it failed: {error.message}")
        return [group[:half], group[half:]]
    work.progress.seconds += time.monotonic() - began
    for candidate, finished in zip(inner.request.candidates, runs, strict=False):
        spec = candidate.spec
        work.runs[spec] = finished
        work.progress.context = finished.summary.corpus.context
        where = folders[spec].relative_to(work.folder).as_posix()
        speed = measurement.speeds.get(spec)
        work.progress.done[spec] = Done(run=where, files=_files(candidate), speed=speed)
    sweeps.write_progress(work.folder, work.progress)
    for finished in runs:
        missing = leave_page(finished)
        if missing:
            work.watch.stage(missing)
    if not isinstance(inner, LenientMeasurement):
        return []
    work.reasons |= inner.left_out
    by_spec = {candidate.spec: candidate for candidate in group}
    return [[by_spec[spec] for spec in inner.no_room]] if inner.no_room else []


def _files(source: SourceSpec | None) -> list[list[Any]]:
    """How a source's files look: name, size and time of each, by which a changed model is noticed.

    Empty for what is not on this disk by that name: a hub id, the demo model, an endpoint.
    """
    if source is None or source.kind == "endpoint":
        return []
    name = source.path or source.spec
    path = Path(name).expanduser()
    if not path.exists():  # SPEC@CONVERSION
        path = Path(name.rpartition("@")[0] or name).expanduser()
    try:
        files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path] if path.is_file() else []
        return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    except OSError:
        return []
