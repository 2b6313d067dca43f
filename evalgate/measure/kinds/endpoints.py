"""Some model is an endpoint: all sides answer window by window through a dialect, and KL is bounded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from evalgate.core import SourceInfo
from evalgate.errors import UsageError
from evalgate.measure.bounds import narrowed, unknown_counts
from evalgate.measure.contract import RunMeasurement, TableScores
from evalgate.measure.cutting import cut_for_sides, read_text
from evalgate.measure.inputs import Inputs, versions
from evalgate.measure.request import Observer
from evalgate.measure.scoring import ask_sides, sides_scores
from evalgate.measure.sides import Sides, opened
from evalgate.measure.tokenizers import tokenizer_notes
from evalgate.store.partial import PartialRun

if TYPE_CHECKING:
    import pyarrow as pa

    from evalgate.corpora.corpus import Corpus


class EndpointMeasurement(RunMeasurement):
    """A run in which some model is an endpoint and none is recorded. Models loaded here are asked like endpoints."""

    _corpus: Corpus
    _sides: Sides

    def check(self) -> None:
        """See `Measurement`."""
        super().check()
        if self.judge is not None:
            raise UsageError("a sequential gate needs models that are loaded here: leave out --sequential")

    def read(self, watch: Observer) -> None:
        """See `Measurement`."""
        self._corpus = read_text(self.request, watch)

    def documents(self) -> Sequence[tuple[str, str]]:
        """See `Measurement`."""
        return [(document.name, document.domain) for document in self._corpus.documents]

    @contextmanager
    def open(self, watch: Observer) -> Iterator[Sequence[SourceInfo]]:
        """See `Measurement`. Endpoints do not name their vocabulary; the probe compares it with a model loaded here."""
        device, logits = self.request.device, self.request.logits
        with opened(
            self.request.models, self.request.endpoint, device=device, logits=logits, watch=watch
        ) as self._sides:
            yield [info for info in self._sides.infos.values() if info.kind == "embedded"]

    def windows(self, watch: Observer) -> Inputs:
        """See `Measurement`."""
        policy, limit, found = cut_for_sides(self.request, self._sides, self._corpus, watch)
        infos = self._sides.infos
        return Inputs(
            sources=infos,
            corpus=self._corpus,
            windows=found.windows,
            skipped=found.skipped,
            policy=policy,
            limit=limit,
            notes=(*tokenizer_notes(list(infos.values())), *self._sides.notes),
            versions=versions(self._sides.versions()),
        )

    def identity(self, inputs: Inputs) -> dict[str, Any]:
        """See `RunMeasurement`. What a probe measures anew each time is left out."""
        return {**super().identity(inputs), "sources": self._sides.identity()}

    def score(self, inputs: Inputs, kept: PartialRun, watch: Observer) -> TableScores:
        """See `Measurement`."""
        measured = ask_sides(self.request, self._sides, self.request.reference_spec, inputs.windows, kept.folder, watch)
        notes = [*measured.notes, *_unknown_notes(measured.table)]
        return sides_scores(self.request, inputs.windows, measured, narrowed(measured.table), notes)


def _unknown_notes(table: pa.Table) -> list[str]:
    return [
        f"{name} is not known at {count:,} of {table.num_rows:,} positions, which count as intervals: a larger "
        "--top-k knows more"
        for name, count in unknown_counts(table).items()
    ]
