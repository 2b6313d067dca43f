"""As `embedded`, but candidates that cannot be loaded, or not be compared with the reference, are left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from evalgate.core import SourceInfo, counted
from evalgate.errors import MismatchError, ServerError
from evalgate.measure.comparable import check_comparable
from evalgate.measure.embedded import loaded
from evalgate.measure.kinds.embedded import EmbeddedMeasurement
from evalgate.measure.request import Observer


class ReferenceFailed(ServerError):
    """The reference itself cannot be loaded, so that no candidate can be measured."""


class NothingLeft(ServerError):
    """No candidate could be loaded; `LenientMeasurement.left_out` says why."""


class LenientMeasurement(EmbeddedMeasurement):
    """A run of the candidates that can be loaded beside the reference, all in one server.

    left_out: by spec, why a candidate cannot be measured. no_room: specs of those that did not fit beside the others.
    """

    left_out: dict[str, str]
    no_room: list[str]

    @contextmanager
    def open(self, watch: Observer) -> Iterator[Sequence[SourceInfo]]:
        """See `Measurement`. The request's candidates are from here on those that are measured.

        Raises ReferenceFailed, and NothingLeft.
        """
        reference = str(self.request.reference_spec)
        self.left_out, self.no_room = {}, []
        with loaded(self.request.specs, self.request, watch, keep_going=True) as (self._server, self._client):
            self.left_out = {spec: why for spec, why in self._server.failed.items() if spec != reference}
            self.no_room = [spec for spec in self._server.no_room if spec != reference]
            if reference in self._server.failed:
                raise ReferenceFailed(self._server.failed[reference])
            gone = {*self.left_out, *self.no_room}
            there = [reference, *(c.spec for c in self.request.candidates if c.spec not in gone)]
            infos = self._client.sources(dict.fromkeys(there))
            for spec in there[1:]:
                why = self._why_not(infos[reference], infos[spec])
                if why:
                    self.left_out[spec] = why
            kept = [c for c in self.request.candidates if c.spec not in {*self.left_out, *self.no_room}]
            if not kept:
                raise NothingLeft("no candidate can be loaded")
            self.request = replace(self.request, candidates=tuple(kept))
            self._sources = {spec: infos[spec] for spec in self.request.specs}
            yield list(self._sources.values())

    def _why_not(self, reference: SourceInfo, candidate: SourceInfo) -> str:
        """Why a candidate cannot be compared with the reference; empty where it can."""
        try:
            check_comparable([reference, candidate])
        except MismatchError as error:
            return error.message
        context = self.request.context
        if context is not None and candidate.context_length < context <= reference.context_length:
            length = counted(candidate.context_length, "token")
            return f"its context of {length} is shorter than the windows' {context}: give a smaller --context"
        return ""
