"""Models that the embedded server holds: loading them, and their exact scores as tables."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from evalgate.core import Window, table_schema
from evalgate.measure import noise
from evalgate.measure.request import OVERLAP_K, Judge, Observer, RunRequest
from evalgate.server.batches import Batch
from evalgate.server.client import EmbeddedClient
from evalgate.server.process import EmbeddedServer

if TYPE_CHECKING:
    import pyarrow as pa


@contextmanager
def loaded(
    specs: Sequence[str], request: RunRequest, watch: Observer
) -> Iterator[tuple[EmbeddedServer, EmbeddedClient]]:
    """A running server with these models and its client; both are closed after the block.

    Raises ServerError where a model cannot be loaded.
    """
    with (
        EmbeddedServer(
            specs, device=request.device, options=["--logits", request.logits], on_stage=watch.stage
        ) as server,
        closing(EmbeddedClient(server)) as client,
    ):
        yield server, client


def collected(
    found: Generator[Batch, None, None],
    watch: Observer,
    *,
    judge: Judge | None = None,
    schema: pa.Schema | None = None,
) -> tuple[pa.Table, int]:
    """All batches as one table, and how many windows it holds: fewer than all where the judge ended early."""
    import pyarrow as pa

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


def token_texts(client: EmbeddedClient, model: str, table: pa.Table) -> dict[int, str]:
    """Token id -> text for every id in the table; bytes that are not a whole character become U+FFFD."""
    vocabulary = client.vocabulary(model)
    ids = sorted(table.column("token").unique().to_pylist())
    return {i: vocabulary[i].decode("utf-8", "replace") for i in ids}


def pair_scores(client: EmbeddedClient) -> noise.Ask:
    """How `evalgate.measure.noise` asks for exact scores of models against another one."""

    def ask(against: str, models: Sequence[str], part: Sequence[Window], apart: bool) -> pa.Table:
        scores = client.score(models, part, reference=against, overlap_k=OVERLAP_K, apart=apart)
        return token_table(scores, models, part, pair=True)

    return ask
