"""All models are loaded here, in one server, which compares their whole distributions: exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from evalgate.core import SourceInfo, Window, counted
from evalgate.measure import noise
from evalgate.measure.alternatives import Worst
from evalgate.measure.contract import RunMeasurement, TableScores
from evalgate.measure.cutting import cut_for_models, in_document_order, read_text
from evalgate.measure.embedded import AskPair, client_of, collected, loaded, pair_scores, passes_shown, scored
from evalgate.measure.inputs import Inputs, versions
from evalgate.measure.recordings import shown_mean
from evalgate.measure.request import Judge, Observer
from evalgate.measure.tokenizers import cut_notes, template_notes, token_texts
from evalgate.server.client import EmbeddedClient, KeptRows
from evalgate.server.process import EmbeddedServer
from evalgate.store.partial import PartialRun

if TYPE_CHECKING:
    from evalgate.corpora.corpus import Corpus


class EmbeddedMeasurement(RunMeasurement):
    """A run of models that are all loaded here."""

    _corpus: Corpus
    _server: EmbeddedServer
    _client: EmbeddedClient
    _sources: dict[str, SourceInfo]

    def read(self, watch: Observer) -> None:
        """See `Measurement`."""
        self._corpus = read_text(self.request, watch)

    def documents(self) -> Sequence[tuple[str, str]]:
        """See `Measurement`."""
        return [(document.name, document.domain) for document in self._corpus.documents]

    @contextmanager
    def open(self, watch: Observer) -> Iterator[Sequence[SourceInfo]]:
        """See `Measurement`."""
        with loaded(self.request.specs, self.request, watch) as (self._server, self._client):
            self._sources = self._client.sources(self.request.specs)
            yield list(self._sources.values())

    def windows(self, watch: Observer) -> Inputs:
        """See `Measurement`. The first model cuts the text."""
        sources = list(self._sources.values())
        templates = template_notes(sources, self._corpus.documents, allowed=self.request.allow_template)
        policy, limit, found = cut_for_models(self.request, self._client, sources, self._corpus, watch)
        return Inputs(
            sources=self._sources,
            corpus=self._corpus,
            windows=found.windows,
            skipped=found.skipped,
            policy=policy,
            limit=limit,
            notes=(*found.notes, *templates, *cut_notes(self._client, sources, self._corpus.documents, found.windows)),
            versions=versions(self._client.versions()),
        )

    def score(self, inputs: Inputs, kept: PartialRun, watch: Observer) -> TableScores:
        """See `Measurement`. A judge is shown each batch, and may end the measurement after it."""
        windows = in_document_order(self.request, inputs.windows)
        if self.judge is not None:
            _begin(self.judge, windows, noise_floor=next(iter(self._sources.values())).noise_floor)
        batches = scored(
            self._server,
            self._client,
            windows,
            AskPair(self._candidates, self._reference, keep=self.request.cache and self.request.cluster is None),
            sources=self._sources,
            names=self._candidates,
            running=shown_mean(self.request).values,
            kept=kept,
            texts_of=next(iter(self._sources.values())).name,
        )
        worst = Worst()
        with passes_shown(self._client, self._sources.values(), watch):
            table, done = collected(batches, watch, worst=worst, judge=self.judge)
        rows = self._rows
        return TableScores(
            windows=tuple(windows[:done]),
            table=table,
            alternatives=worst.of(table),
            notes=(*_stopped_notes(done, len(windows)), *_cache_notes(rows)),
        )

    def is_new(self, kept: PartialRun) -> bool:
        """See `Measurement`. A run without its reference's body says nothing about how long one with it takes."""
        rows = self._rows
        return super().is_new(kept) and not (rows is not None and rows.stored)

    @property
    def _rows(self) -> KeptRows | None:
        """What the server says of the reference's kept hidden states; None where none are kept."""
        if self._reference is None or self.request.cluster is not None or not self.request.cache:
            return None
        return self._client.kept_rows(self._reference)

    def noise_floors(self, scores: TableScores, watch: Observer) -> list[noise.Itself]:
        """See `RunMeasurement`. The server is restarted on the way."""
        if not self.request.noise_floor or self._reference is None:
            return []
        watch.stage("measuring the noise floor")
        sample = noise.sample(scores.windows)
        ask = pair_scores(self._client)
        found = noise.shapes(ask, [self._reference, *self._candidates], sample)
        found += noise.again(noise.WARM, ask, self._reference, self._candidates, sample, scores.table)
        self._server.stop()
        self._server.start()
        with closing(client_of(self._server)) as fresh:  # the server has a new port
            ask = pair_scores(fresh)
            return found + noise.again(noise.RESTART, ask, self._reference, self._candidates, sample, scores.table)

    def speeds(self) -> dict[str, float]:
        """See `RunMeasurement`. As the server counted each model's own time."""
        by_name = self._client.speeds()
        return {spec: by_name[info.name] for spec, info in self._sources.items() if info.name in by_name}

    def token_texts(self, scores: TableScores) -> dict[int, str]:
        """See `RunMeasurement`. The first model's."""
        return token_texts(self._client, next(iter(self._sources.values())).name, scores.table, scores.alternatives)

    @property
    def _reference(self) -> str | None:
        """The reference's name on the server."""
        spec = self.request.reference_spec
        return None if spec is None else self._sources[spec].name

    @property
    def _candidates(self) -> list[str]:
        """The candidates' names on the server."""
        return [self._sources[spec].name for spec in self.request.candidate_specs]


def _cache_notes(rows: KeptRows | None) -> list[str]:
    """What went wrong with the kept hidden states of the reference; nothing where they were found or written."""
    found = []
    if rows is not None and rows.rebuilt:
        found.append(
            f"of the reference's hidden states in the cache {counted(rows.rebuilt, 'file')} could not be "
            "trusted (cut or altered): computed anew"
        )
    if rows is not None and rows.problem:
        found.append(f"the reference's hidden states are not kept for the next run: {rows.problem}")
    return found


def _begin(judge: Judge, windows: Sequence[Window], *, noise_floor: float | None) -> None:
    expected: dict[str, int] = {}
    for window in windows:
        expected[window.document] = expected.get(window.document, 0) + len(window.positions)
    judge.begin(expected, domains={w.document: w.domain for w in windows}, noise_floor=noise_floor)


def _stopped_notes(scored: int, windows: int) -> list[str]:
    if scored == windows:
        return []
    return [
        f"stopped after {scored} of {counted(windows, 'window')}, when the sequential verdict was reached: "
        "intervals of the other figures are for a fixed size and do not account for that"
    ]
