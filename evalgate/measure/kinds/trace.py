"""The reference is recorded, as a trace or a logits file, and the candidates are loaded here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from evalgate.core import SourceInfo
from evalgate.measure import noise
from evalgate.measure.alternatives import Worst
from evalgate.measure.checks import check_recorded
from evalgate.measure.comparable import check_contexts, with_known_vocabulary
from evalgate.measure.contract import RunMeasurement, TableScores
from evalgate.measure.cutting import sampled
from evalgate.measure.embedded import collected, loaded, pair_scores, passes_shown, scored
from evalgate.measure.inputs import Inputs, versions
from evalgate.measure.recordings import AskRecorded, Recorded, open_recorded, shown_mean
from evalgate.measure.request import Observer
from evalgate.measure.tokenizers import token_texts, tokenizer_notes
from evalgate.server.client import EmbeddedClient
from evalgate.server.process import EmbeddedServer
from evalgate.store.partial import PartialRun


class TraceMeasurement(RunMeasurement):
    """A run against a recording, which brings its windows. Candidates are asked for the ids or rows that it keeps."""

    _recorded: Recorded
    _server: EmbeddedServer
    _client: EmbeddedClient
    _sources: dict[str, SourceInfo]  # of the candidates

    def check(self) -> None:
        """See `Measurement`."""
        super().check()
        check_recorded(self.request, self.judge)

    def read(self, watch: Observer) -> None:
        """See `Measurement`."""
        self._recorded = open_recorded(self.request.reference)

    def documents(self) -> Sequence[tuple[str, str]] | None:
        """See `Measurement`."""
        return self._recorded.documents

    @contextmanager
    def open(self, watch: Observer) -> Iterator[Sequence[SourceInfo]]:
        """See `Measurement`."""
        more = self._recorded.server_options()
        with loaded(self.request.candidate_specs, self.request, watch, more=more) as (self._server, self._client):
            self._sources = self._client.sources(self.request.candidate_specs)
            candidates = list(self._sources.values())
            yield [with_known_vocabulary(self._recorded.info, candidates[0]), *candidates]

    def windows(self, watch: Observer) -> Inputs:
        """See `Measurement`. They were recorded; the first candidate says what a logits file does not."""
        recorded = self._recorded
        whole = recorded.windows(self._client, self._candidates[0])
        windows = sampled(self.request, whole)
        check_contexts(windows, list(self._sources.values()))
        sources = {str(self.request.reference): recorded.info, **self._sources}
        return Inputs(
            sources=sources,
            corpus=recorded.text(whole),
            windows=windows,
            skipped=(),
            policy=recorded.policy,
            limit=None,
            notes=tuple(tokenizer_notes(list(sources.values()))),
            versions=versions(self._client.versions()),
        )

    def identity(self, inputs: Inputs) -> dict[str, Any]:
        """See `RunMeasurement`."""
        return super().identity(inputs) | self._recorded.identity()

    def score(self, inputs: Inputs, kept: PartialRun, watch: Observer) -> TableScores:
        """See `Measurement`."""
        batches = scored(
            self._server,
            self._client,
            inputs.windows,
            AskRecorded(self.request.reference, self._candidates, self._recorded),
            sources=self._sources,
            names=self._candidates,
            running=shown_mean(self.request).values,
            kept=kept,
            texts_of=self._candidates[0],
        )
        worst = Worst()
        with passes_shown(self._client, self._sources.values(), watch):
            wide, _ = collected(batches, watch, worst=worst)
        table, notes = self._recorded.finished(wide)
        if self.request.noise_floor:
            notes = [*notes, "the noise floor is that of the candidates alone: a recording cannot be scored again"]
        return TableScores(windows=inputs.windows, table=table, alternatives=worst.of(table), notes=tuple(notes))

    def noise_floors(self, scores: TableScores, watch: Observer) -> list[noise.Itself]:
        """See `RunMeasurement`. Of the candidates, in other batch shapes: a table with estimates repeats nothing."""
        if not self.request.noise_floor:
            return []
        watch.stage("measuring the noise floor")
        return noise.shapes(pair_scores(self._client), self._candidates, noise.sample(scores.windows))

    def token_texts(self, scores: TableScores) -> dict[int, str]:
        """See `RunMeasurement`. The first candidate's."""
        return token_texts(self._client, self._candidates[0], scores.table, scores.alternatives)

    @property
    def _candidates(self) -> list[str]:
        """The candidates' names on the server."""
        return [self._sources[spec].name for spec in self.request.candidate_specs]
