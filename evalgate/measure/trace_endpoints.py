"""Candidates against a trace where some are endpoints: every candidate answers window by window."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from evalgate.core import Window
from evalgate.endpoints.budget import Spending
from evalgate.errors import MismatchError, UsageError
from evalgate.measure.recordings import Recorded
from evalgate.measure.request import Observer, RunRequest
from evalgate.measure.result import Setting, endpoint_notes, finished_run, identity_of
from evalgate.measure.setting import (
    check_comparable,
    comparable,
    in_budget_order,
    recorded_corpus,
    sampled,
    tokenizer_notes,
)
from evalgate.store.partial import partial_run
from evalgate.store.runs import Run
from evalgate.windows import WindowSet

if TYPE_CHECKING:
    from evalgate.measure.endpoints import Sides


def run_recorded_endpoints(request: RunRequest, recorded: Recorded, watch: Observer, began: float) -> Run:
    """Measure the candidates against a trace, which brings its windows.

    Raises UsageError for another kind of recording, and the errors of evalgate.measure.endpoints and of the endpoints.
    """
    from evalgate.measure.endpoints import opened
    from evalgate.measure.recordings.asked import AskedTrace, tells_ids
    from evalgate.measure.recordings.trace import RecordedTrace

    if not isinstance(recorded, RecordedTrace):
        raise UsageError(
            f"{request.reference} is a logits file, which endpoints cannot be compared with: record a trace with "
            "`evalgate record --ref SOURCE --out ref.trace`"
        )
    specs = list(dict.fromkeys(request.candidates))
    with opened(specs, request.endpoint, device=request.device, logits=request.logits, watch=watch) as sides:
        notes = check_vocabulary(recorded, sides)
        whole = WindowSet(recorded.trace.windows, ())
        cutting = sampled(request, whole)
        _check_length(cutting.windows, sides.context)
        sources = {str(request.reference): recorded.info, **sides.infos}
        corpus = recorded_corpus(recorded, whole.windows)
        versions = {"evalgate": metadata.version("evalgate"), **sides.versions()}
        windows = in_budget_order(request, cutting.windows)
        named = [spec for spec in specs if tells_ids(recorded, sides.sources[spec], cutting.windows[0])]
        setting = Setting(sources, corpus, cutting, recorded.policy, None, versions)
        identity = {
            **identity_of(request, setting),
            **recorded.identity(),
            "sources": sides.identity(),
            "named": named,
        }
        against = AskedTrace(recorded, named)
        watch.start(windows=len(windows), positions=sum(len(w.positions) for w in windows))
        with partial_run(identity, resume=request.resume) as partial:
            measured = sides.score(
                None,
                specs,
                windows,
                folder=partial.folder,
                spending=Spending(request.budget),
                advance=lambda window, means: watch.advance(windows=1, positions=len(window.positions), running=means),
                against=against,
            )
            table, said = against.finished(measured.table)
            notes += [*tokenizer_notes(list(sources.values())), *sides.notes, *measured.notes, *said]
            notes += endpoint_notes(request, measured, of=len(windows))
            result = finished_run(request, setting.answered(table), table, identity, began, notes=notes)
            if measured.whole:
                partial.discard()
    return result


def check_vocabulary(recorded: Recorded, sides: Sides) -> list[str]:
    """Hold every model loaded here to the trace; endpoints were held to one of them, or that is not known: a note.

    Raises MismatchError where a vocabulary is another one.
    """
    embedded = [info for info in sides.infos.values() if info.kind == "embedded"]
    local = [*embedded, *([sides.tokenizer] if sides.tokenizer is not None else [])]
    if local:
        check_comparable(comparable(recorded.info, local))
        return []
    return [
        f"whether {spec} has the vocabulary of the trace is not known: --tokenizer SPEC names a local copy to check it"
        for spec in sides.infos
    ]


def _check_length(windows: Sequence[Window], longest: int | None) -> None:
    length = max(len(window.ids) for window in windows)
    if longest is not None and length > longest:
        raise MismatchError(
            f"the recording has windows of {length} tokens and the candidates take {longest} at most: record one with "
            "a shorter --context"
        )
