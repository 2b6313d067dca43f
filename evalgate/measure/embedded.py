"""Models that the embedded server holds: loading them, and their exact scores as tables."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from evalgate.core import Window
from evalgate.measure import noise
from evalgate.measure.request import OVERLAP_K, Judge, Observer, RunRequest
from evalgate.server.batches import Batch
from evalgate.server.client import EmbeddedClient
from evalgate.server.process import EmbeddedServer
from evalgate.table import build, score_columns

if TYPE_CHECKING:
    import pyarrow as pa


@contextmanager
def loaded(
    specs: Sequence[str], request: RunRequest, watch: Observer, *, keep_going: bool = False
) -> Iterator[tuple[EmbeddedServer, EmbeddedClient]]:
    """A running server with these models and its client; both are closed after the block.

    Raises ServerError where a model cannot be loaded; with `keep_going` only where none can, and `server.failed` says
    which ones are left out.
    """
    options = ["--logits", request.logits, *(["--check"] if request.check else [])]
    options += ["--keep-going"] if keep_going else []
    with (
        EmbeddedServer(specs, device=request.device, options=options, on_stage=watch.stage) as server,
        closing(EmbeddedClient(server)) as client,
    ):
        yield server, client


def collected(
    found: Generator[Batch, None, None],
    watch: Observer,
    *,
    judge: Judge | None = None,
) -> tuple[pa.Table, int]:
    """All batches as one table, and how many windows it holds: fewer than all where the judge ended early."""
    import pyarrow as pa

    tables: list[pa.Table] = []
    scored = 0
    with closing(found):
        for batch in found:
            tables.append(batch.table)
            scored = batch.stop
            watch.advance(
                windows=len(batch.windows),
                positions=sum(len(w.positions) for w in batch.windows),
                running=batch.running,
            )
            if judge is not None and judge.take(batch.table):
                break
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks(), scored


def token_table(scores: pa.Table, names: Sequence[str], windows: Sequence[Window], *, pair: bool) -> pa.Table:
    """Server rows (candidate, window, position order, checked by the client) as rows of `table.schema`."""
    return build(names, windows, {name: scores.column(name) for name in score_columns(pair=pair)})


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
