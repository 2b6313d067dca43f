"""Exact scoring on the embedded server: all windows, batch by batch, as one token-score table."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from evalgate.core import SourceInfo, Window, table_schema
from evalgate.measure import noise
from evalgate.measure.request import OVERLAP_K, Judge, Observer, RunRequest
from evalgate.server.batches import Batch, score_batches
from evalgate.server.client import EmbeddedClient
from evalgate.server.process import EmbeddedServer
from evalgate.store.partial import PartialRun

if TYPE_CHECKING:
    import pyarrow as pa


def score_all(
    request: RunRequest,
    client: EmbeddedClient,
    sources: dict[str, SourceInfo],
    windows: Sequence[Window],
    partial: PartialRun,
    watch: Observer,
    judge: Judge | None = None,
) -> tuple[pa.Table, int]:
    """The token-score table of all windows, batch by batch; batches answered earlier are taken over.

    Ends early where the judge says so; gives the number of windows scored beside the table.
    """
    names = [sources[spec].name for spec in request.candidates]
    reference = sources[request.reference].name if request.reference else None
    pair = reference is not None

    def ask(part: Sequence[Window]) -> pa.Table:
        scores = client.score(names, part, reference=reference, overlap_k=OVERLAP_K)
        return token_table(scores, names, part, pair=pair)

    running = "kl" if pair else "cand_nll"
    found = score_batches(windows, ask, names=names, running=running, partial=partial, abandon=client.abandon)
    return collect(found, windows, watch, judge=judge, schema=table_schema(pair=pair))


def collect(
    found: Generator[Batch, None, None],
    windows: Sequence[Window],
    watch: Observer,
    *,
    judge: Judge | None = None,
    schema: pa.Schema | None = None,
) -> tuple[pa.Table, int]:
    """All batches as one table, and the number of windows in it: fewer than all where the judge ends the run."""
    import pyarrow as pa

    watch.start(windows=len(windows), positions=sum(len(w.positions) for w in windows))
    tables: list[pa.Table] = []
    scored = 0
    with closing(found):
        for batch in found:
            table = batch.table if schema is None else batch.table.cast(schema)
            tables.append(table)
            scored = batch.stop
            watch.advance(
                windows=len(batch.windows),
                positions=sum(len(w.positions) for w in batch.windows),
                running=batch.running,
            )
            if judge is not None and judge.take(table):
                break
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks(), scored


def token_table(scores: pa.Table, names: Sequence[str], windows: Sequence[Window], *, pair: bool) -> pa.Table:
    """Server rows (candidate, window, position order, checked by the client) as rows of core.table_schema."""
    import numpy as np
    import pyarrow as pa

    places = [(w, p) for w in windows for p in w.positions]
    repeat = len(names)

    def tiled(values: list[int]) -> pa.Array:
        return pa.array(np.tile(np.array(values, dtype=np.int32), repeat))

    def text(values: list[str]) -> pa.Array:
        return pa.array(values * repeat).dictionary_encode()

    columns = {
        "candidate": pa.array([name for name in names for _ in places]).dictionary_encode(),
        "domain": text([w.domain for w, _ in places]),
        "document": text([w.document for w, _ in places]),
        "window": tiled([w.index for w, _ in places]),
        "position": tiled([p for _, p in places]),
        "token": tiled([w.ids[p] for w, p in places]),
        "bytes": tiled([w.bytes_per_token[p] for w, p in places]),
    }
    schema = table_schema(pair=pair)
    arrays = [columns[name] if name in columns else scores.column(name) for name in schema.names]
    return pa.table(arrays, names=schema.names).cast(schema)


def noise_floors(
    request: RunRequest,
    server: EmbeddedServer,
    client: EmbeddedClient,
    sources: dict[str, SourceInfo],
    windows: Sequence[Window],
    table: pa.Table,
    watch: Observer,
) -> list[noise.Itself]:
    """Every model against itself; the server is restarted on the way. Empty where it was not asked for."""
    if not request.noise_floor or request.reference is None:
        return []
    watch.stage("measuring the noise floor")
    names = [sources[spec].name for spec in request.candidates]
    reference = sources[request.reference].name
    sample = noise.sample(windows)
    found = noise.shapes(asking(client), [reference, *names], sample)
    found += noise.again(noise.WARM, asking(client), reference, names, sample, table)
    server.stop()
    server.start()
    with closing(EmbeddedClient(server)) as fresh:
        return found + noise.again(noise.RESTART, asking(fresh), reference, names, sample, table)


def asking(client: EmbeddedClient) -> noise.Ask:
    """How `evalgate.measure.noise` asks for pair scores of a model against another."""

    def ask(against: str, models: Sequence[str], part: Sequence[Window], apart: bool) -> pa.Table:
        scores = client.score(models, part, reference=against, overlap_k=OVERLAP_K, apart=apart)
        return token_table(scores, models, part, pair=True)

    return ask
