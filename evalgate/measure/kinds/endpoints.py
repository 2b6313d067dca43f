"""Some model is an endpoint: it and its reference answer window by window through a dialect, and KL is bounded.

Candidates that are loaded here beside their reference are scored by the server that holds both, as where no endpoint
takes part, and stay exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalgate.core import SourceInfo, Window
from evalgate.errors import UsageError
from evalgate.measure.alternatives import Worst, without_lists
from evalgate.measure.bounds import narrowed, unknown_counts
from evalgate.measure.contract import RunMeasurement, TableScores
from evalgate.measure.cutting import cut_for_sides, read_text
from evalgate.measure.embedded import with_alternatives
from evalgate.measure.inputs import Inputs, versions
from evalgate.measure.recordings import ShownMean
from evalgate.measure.request import Observer
from evalgate.measure.scoring import ask_sides, sides_scores
from evalgate.measure.sides import Sides, opened
from evalgate.measure.tokenizers import tokenizer_notes
from evalgate.server.batches import request_tokens, score_batches
from evalgate.store.partial import PartialRun

if TYPE_CHECKING:
    import pyarrow as pa

    from evalgate.corpora.corpus import Corpus


class EndpointMeasurement(RunMeasurement):
    """A run in which some model is an endpoint and none is recorded. A reference loaded here is asked like one too."""

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
        asked = self.request
        with opened(
            asked.models,
            asked.endpoint,
            device=asked.device,
            logits=asked.logits,
            watch=watch,
            check=asked.check,
            server_options=asked.server_options,
            python=asked.python,
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
            notes=(*found.notes, *tokenizer_notes(list(infos.values())), *self._sides.notes),
            versions=versions(self._sides.versions()),
        )

    def identity(self, inputs: Inputs) -> dict[str, Any]:
        """See `RunMeasurement`. What a probe measures anew each time is left out."""
        return {**super().identity(inputs), "sources": self._sides.identity()}

    def score(self, inputs: Inputs, kept: PartialRun, watch: Observer) -> TableScores:
        """See `Measurement`."""
        request, here = self.request, self._loaded_here()
        asked = [spec for spec in request.candidate_specs if spec not in here]
        measured = ask_sides(
            request, self._sides, request.reference_spec, inputs.windows, kept.folder, watch, candidates=asked
        )
        notes = [*measured.notes, *_unknown_notes(measured.table)]
        table = narrowed(measured.table)
        worst = Worst()
        if here:
            watch.stage("scoring what is loaded here")
            answered = set(table.column("window").to_pylist())
            shown = [window for window in inputs.windows if window.index in answered]
            table = self._joined(table, self._exact(here, shown, kept.folder, worst))
        return sides_scores(request, inputs.windows, measured, table, notes, loaded_here=worst.of(table))

    def token_texts(self, scores: TableScores) -> dict[int, str] | None:
        """See `RunMeasurement`. Those of the tokenizer that is loaded here, if one is."""
        return self._sides.token_texts(scores.table, scores.alternatives)

    def _loaded_here(self) -> list[str]:
        """Specs of the candidates that our server holds together with their reference, if they have one."""
        infos, reference = self._sides.infos, self.request.reference_spec
        if reference is not None and infos[reference].kind != "embedded":
            return []
        return [spec for spec in dict.fromkeys(self.request.candidate_specs) if infos[spec].kind == "embedded"]

    def _exact(self, specs: Sequence[str], windows: Sequence[Window], folder: Path, worst: Worst) -> pa.Table:
        """Exact rows of the candidates; those that an interrupted run left in `folder` are reused."""
        import pyarrow as pa

        client, infos, reference = self._sides.client, self._sides.infos, self.request.reference_spec
        assert client is not None  # some side is loaded here
        names = [infos[spec].name for spec in specs]
        against = None if reference is None else infos[reference].name
        batches = score_batches(
            windows,
            lambda part: with_alternatives(client, names, part, reference=against),
            names=names,
            running=ShownMean("cand_nll", "nll").values,
            partial=PartialRun(folder / "exact"),
            abandon=client.abandon,
            together=request_tokens([infos[spec] for spec in specs]),
        )
        tables = []
        for batch in batches:
            worst.add(batch.table)
            tables.append(without_lists(batch.table))
        return pa.concat_tables(tables)

    def _joined(self, bounded: pa.Table, exact: pa.Table) -> pa.Table:
        """Both tables as one, in the order of the request; a column that a candidate lacks is null for it."""
        import pyarrow as pa
        import pyarrow.compute as pc

        infos = self._sides.infos
        parts = []
        for spec in dict.fromkeys(self.request.candidate_specs):
            for table in (bounded, exact):
                mine = table.filter(pc.equal(table.column("candidate").cast("string"), infos[spec].name))
                parts += [mine] if mine.num_rows else []
        return pa.concat_tables(parts, promote_options="default").unify_dictionaries().combine_chunks()


def _unknown_notes(table: pa.Table) -> list[str]:
    return [
        f"{name} is not known at {count:,} of {table.num_rows:,} positions, which count as intervals: a larger "
        "--top-k knows more"
        for name, count in unknown_counts(table).items()
    ]
