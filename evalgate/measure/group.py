"""Several candidates in one measurement, which gives one run for each: the reference runs once for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalgate.core import SourceInfo
from evalgate.errors import UsageError
from evalgate.measure.contract import Measurement, RunMeasurement, TableScores
from evalgate.measure.inputs import Inputs
from evalgate.measure.request import Observer
from evalgate.measure.result import summed_up
from evalgate.measure.tokenizers import shown_ids
from evalgate.store.partial import PartialRun, partial_root
from evalgate.store.runs import Run, write_run

if TYPE_CHECKING:
    import pyarrow as pa


class GroupMeasurement(Measurement[PartialRun, TableScores, "list[Run]"]):
    """Any kind of measurement, whose outcome is one run for each candidate, as if it had been measured alone.

    folders: by spec, where its run goes. The windows are resumed like those of one run of all candidates.
    """

    def __init__(self, inner: RunMeasurement, folders: Mapping[str, Path]) -> None:
        self.inner = inner
        self.folders = folders
        self.speeds: dict[str, float] = {}

    def check(self) -> None:
        """See `Measurement`. The request was checked with all candidates of the sweep."""
        partial_root()

    def read(self, watch: Observer) -> None:
        """See `Measurement`."""
        self.inner.read(watch)

    def documents(self) -> Sequence[tuple[str, str]] | None:
        """See `Measurement`."""
        return self.inner.documents()

    def open(self, watch: Observer) -> AbstractContextManager[Sequence[SourceInfo]]:
        """See `Measurement`."""
        return self.inner.open(watch)

    def windows(self, watch: Observer) -> Inputs:
        """See `Measurement`."""
        return self.inner.windows(watch)

    def resume(self, inputs: Inputs) -> AbstractContextManager[PartialRun]:
        """See `Measurement`."""
        return self.inner.resume(inputs)

    def described(self) -> dict[str, Any]:
        """See `Measurement`."""
        return self.inner.described()

    def is_new(self, kept: PartialRun) -> bool:
        """See `Measurement`."""
        return self.inner.is_new(kept)

    def score(self, inputs: Inputs, kept: PartialRun, watch: Observer) -> TableScores:
        """See `Measurement`. Raises UsageError where a budget ended early: a part of the windows ranks nothing."""
        scores = self.inner.score(inputs, kept, watch)
        if not scores.complete:
            raise UsageError(
                f"the budget ended after {len(scores.windows)} of {len(inputs.windows)} windows, and candidates are "
                "compared on the same ones: run the same command with a larger --budget to go on"
            )
        return scores

    def sum_up(self, inputs: Inputs, scores: TableScores, watch: Observer) -> list[Run]:
        """See `Measurement`."""
        inner, request = self.inner, self.inner.request
        self.speeds = inner.speeds()
        texts = inner.token_texts(scores)  # before the noise floor, which restarts the server that knows them
        floors = inner.noise_floors(scores, watch)
        identity, runs = inner.identity(inputs), []
        for candidate in request.candidates:
            pair = [str(request.reference_spec), candidate.spec]
            name = inputs.sources[candidate.spec].name
            others = {info.name for spec, info in inputs.sources.items() if spec not in pair}
            own = replace(
                inputs,
                sources={spec: inputs.sources[spec] for spec in pair},
                notes=tuple(note for note in inputs.notes if not any(note.startswith(f"{other} ") for other in others)),
            )
            table, alternatives = _rows_of(scores.table, name), scores.alternatives
            if alternatives is not None:
                alternatives = _filtered(alternatives, name)
            run = summed_up(
                replace(request, candidates=(candidate,), out=self.folders[candidate.spec]),
                own,
                replace(scores, table=table, alternatives=alternatives),
                _identity_of_one(identity, pair),
                floors=floors,
                token_texts=_of_these(texts, table, alternatives),
                began=inner.began,
            )
            runs.append(run)
        return runs

    def seal(self, outcome: list[Run], scores: TableScores, kept: PartialRun) -> list[Run]:
        """See `Measurement`. Every run is a whole folder."""
        sealed = [
            write_run(
                self.folders[candidate.spec],
                manifest=run.manifest,
                table=run.table,
                summary=run.summary,
                token_texts=run.token_texts,
                alternatives_table=run.alternatives_table,
                overwrite=True,
            )
            for candidate, run in zip(self.inner.request.candidates, outcome, strict=True)
        ]
        kept.discard()
        return sealed


def _rows_of(table: pa.Table, name: str) -> pa.Table:
    """One candidate's rows, with no other name left in the dictionary of the column."""
    import pyarrow as pa

    rows = _filtered(table, name)
    place = rows.schema.get_field_index("candidate")
    named = pa.array([name] * rows.num_rows, pa.string()).dictionary_encode()
    return rows.set_column(place, rows.schema.field("candidate"), named)


def _of_these(texts: dict[int, str] | None, table: pa.Table, alternatives: pa.Table | None) -> dict[int, str] | None:
    """The texts of one run's ids."""
    return None if texts is None else {i: texts[i] for i in shown_ids(table, alternatives) if i in texts}


def _filtered(table: pa.Table, name: str) -> pa.Table:
    import pyarrow.compute as pc

    return table.filter(pc.equal(table.column("candidate").cast("string"), name)).combine_chunks()


def _identity_of_one(identity: dict[str, Any], specs: Sequence[str]) -> dict[str, Any]:
    """The identity of one candidate's run, from that of the whole measurement."""
    sources = {spec: facts for spec, facts in identity["sources"].items() if spec in specs}
    return {**identity, "candidates": [specs[1]], "sources": sources}
