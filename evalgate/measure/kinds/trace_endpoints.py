"""The reference is a trace, and some candidate is an endpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from evalgate.core import SourceInfo, Window, counted
from evalgate.errors import UsageError
from evalgate.measure.checks import check_recorded
from evalgate.measure.comparable import check_length, with_known_vocabulary
from evalgate.measure.contract import RunMeasurement, TableScores
from evalgate.measure.cutting import sampled
from evalgate.measure.inputs import Inputs, versions
from evalgate.measure.recordings import Recorded, open_recorded
from evalgate.measure.recordings.hidden import RecordedHidden
from evalgate.measure.recordings.trace import RecordedTrace
from evalgate.measure.recordings.trace_for_endpoints import (
    TraceForEndpoints,
    gives_ids,
    naming_dialect,
    requests_through,
)
from evalgate.measure.request import Observer
from evalgate.measure.scoring import ask_sides, sides_scores
from evalgate.measure.sides import Sides, opened
from evalgate.measure.tokenizers import tokenizer_notes
from evalgate.store.partial import PartialRun


class TraceEndpointMeasurement(RunMeasurement):
    """A run of endpoints against a trace: estimated where a candidate gives the kept ids, else bounded."""

    _recorded: RecordedTrace
    _sides: Sides
    _named: Sequence[str]  # specs of the candidates that give ids by name

    def check(self) -> None:
        """See `Measurement`."""
        super().check()
        check_recorded(self.request, self.judge)

    def read(self, watch: Observer) -> None:
        """See `Measurement`. Raises UsageError for a recording that keeps no ids."""
        recorded = open_recorded(self.request.reference)
        if isinstance(recorded, RecordedHidden):
            raise UsageError(
                f"{self.request.reference} keeps hidden states, which are compared with models that are loaded here: "
                "record a trace without --hidden for endpoints"
            )
        if not isinstance(recorded, RecordedTrace):
            raise UsageError(
                f"{self.request.reference} is a logits file, which endpoints cannot be compared with: record a trace "
                "with `evalgate record --ref SOURCE --out ref.trace`"
            )
        self._recorded = recorded

    def documents(self) -> Sequence[tuple[str, str]] | None:
        """See `Measurement`."""
        return self._recorded.documents

    @contextmanager
    def open(self, watch: Observer) -> Iterator[Sequence[SourceInfo]]:
        """See `Measurement`."""
        asked = self.request
        candidates = list(dict.fromkeys(asked.candidates))
        with opened(
            candidates,
            asked.endpoint,
            device=asked.device,
            logits=asked.logits,
            watch=watch,
            check=asked.check,
            server_options=asked.server_options,
            python=asked.python,
        ) as self._sides:
            yield held_to_one_vocabulary(self._recorded, self._sides)

    def windows(self, watch: Observer) -> Inputs:
        """See `Measurement`. They were recorded."""
        recorded, sides = self._recorded, self._sides
        windows = sampled(self.request, recorded.trace.windows)
        check_length(windows, sides.context)
        self._named = [spec for spec, source in sides.sources.items() if gives_ids(recorded, source, windows[0])]
        chosen = self._name_ids(windows)
        sources = {str(self.request.reference): recorded.info, **sides.infos}
        notes = [] if held_to_one_vocabulary(recorded, sides) else _unchecked_notes(sides)
        return Inputs(
            sources=sources,
            corpus=recorded.text(recorded.trace.windows),
            windows=windows,
            skipped=(),
            policy=recorded.policy,
            limit=None,
            notes=(*notes, *tokenizer_notes(list(sources.values())), *sides.notes, *chosen),
            versions=versions(sides.versions()),
        )

    def _name_ids(self, windows: Sequence[Window]) -> list[str]:
        """Ask endpoints through a dialect that gives the trace's ids, where one does and the budget allows it.

        Returns what a reader must know of it. A dialect that the user chose stays.
        """
        notes = []
        budget, open_ones = self.request.budget, [s for s in self._sides.sources if s not in self._named]
        for spec in open_ones:
            source = self._sides.sources[spec]
            dialect = naming_dialect(source)
            if not dialect or self.request.endpoint.dialect or source.excess:
                continue
            requests = requests_through(self._recorded, source, dialect, windows)
            cost = f"about {counted(requests, 'request')} in the dialect '{dialect}'"
            if budget.seconds is not None or (budget.requests or requests) < requests * len(open_ones):
                notes.append(f"KL of {spec} would be estimated and not bounded through {cost}: --dialect {dialect}")
                continue
            other = self._sides.through(spec, dialect)
            if gives_ids(self._recorded, other, windows[0]):
                self._sides.sources[spec] = other
                self._named = [*self._named, spec]
                notes.append(
                    f"KL of {spec} is estimated through {cost}; --dialect {source.dialect} takes fewer and bounds it"
                )
        return notes

    def identity(self, inputs: Inputs) -> dict[str, Any]:
        """See `RunMeasurement`. What a probe measures anew each time is left out."""
        asked = {"sources": self._sides.identity(), "named": self._named}
        return super().identity(inputs) | self._recorded.identity() | asked

    def score(self, inputs: Inputs, kept: PartialRun, watch: Observer) -> TableScores:
        """See `Measurement`."""
        trace = TraceForEndpoints(self._recorded, self._named)
        measured = ask_sides(self.request, self._sides, None, inputs.windows, kept.folder, watch, recorded=trace)
        table, notes = trace.finished(measured.table)
        return sides_scores(self.request, inputs.windows, measured, table, [*measured.notes, *notes])

    def token_texts(self, scores: TableScores) -> dict[int, str] | None:
        """See `RunMeasurement`. Those of the tokenizer that is loaded here, if one is."""
        return self._sides.token_texts(scores.table, scores.alternatives)


def held_to_one_vocabulary(recorded: Recorded, sides: Sides) -> list[SourceInfo]:
    """The recording and the models loaded here, which must share one vocabulary; empty where none is loaded.

    Endpoints were held to one of those models by their probe.
    """
    embedded = [info for info in sides.infos.values() if info.kind == "embedded"]
    local = [*embedded, *([sides.tokenizer] if sides.tokenizer is not None else [])]
    return [with_known_vocabulary(recorded.info, local[0]), *local] if local else []


def _unchecked_notes(sides: Sides) -> list[str]:
    return [
        f"whether {spec} has the vocabulary of the trace is not known: --tokenizer SPEC names a local copy to check it"
        for spec in sides.infos
    ]
