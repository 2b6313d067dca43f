"""Models that the embedded server holds: loading them, and their exact scores as tables."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from evalgate.core import SourceInfo, Window
from evalgate.errors import EvalgateError
from evalgate.measure import noise
from evalgate.measure.alternatives import Likeliest, Worst, with_lists, without_lists
from evalgate.measure.request import OVERLAP_K, Judge, Observer, RunRequest
from evalgate.server import kept as kept_servers
from evalgate.server.batches import Batch, request_tokens, score_batches
from evalgate.server.client import EmbeddedClient, HiddenRows
from evalgate.server.cluster import Ask, RayClient, RayServer
from evalgate.server.process import EmbeddedServer
from evalgate.store.alternatives import LISTED
from evalgate.store.hidden import hidden_limit
from evalgate.store.partial import PartialRun
from evalgate.table import build, score_columns

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

_FIRST_PAUSE, _LONGEST_PAUSE = 10.0, 120.0  # seconds between two lines about a pass


@contextmanager
def loaded(
    specs: Sequence[str],
    request: RunRequest,
    watch: Observer,
    *,
    keep_going: bool = False,
    more: Sequence[str] = (),
) -> Iterator[tuple[EmbeddedServer, EmbeddedClient]]:
    """A running server with these models and its client; both are closed after the block. more: options of the server.

    A server that was kept (`evalgate serve --keep`) is used where it gives the same figures, and left running.

    Raises ServerError where a model cannot be loaded; with `keep_going` only where none can, and `server.failed` says
    which ones are left out.
    """
    options = ["--logits", request.logits]
    own = [*(["--check"] if request.check else []), *(["--keep-going"] if keep_going else [])]
    own += [*request.server_options, *more]
    cluster, python, device, stage = request.cluster, request.python, request.device, watch.stage
    made: EmbeddedServer | None = None
    if cluster is not None:
        made = RayServer(cluster, specs, device=device, options=[*options, *own], on_stage=stage, python=python)
    elif not own and not request.noise_floor and python is None:  # what a new server alone can do
        made = kept_servers.find(specs, device=device, options=options, on_stage=stage)
    own += _kept_rows(request, specs)
    made = made or EmbeddedServer(specs, device=device, options=[*options, *own], on_stage=stage, python=python)
    with made as server, closing(client_of(server)) as client:
        yield server, client


def _kept_rows(request: RunRequest, specs: Sequence[str]) -> list[str]:
    """The server's options for the reference's hidden states in the cache, where it is loaded here."""
    reference = request.reference_spec
    if not request.cache or request.memory is not None or reference is None or reference not in specs:
        return []
    limit = hidden_limit()
    return ["--keep-rows", reference, "--keep-bytes", str(limit)] if limit else []


@contextmanager
def passes_shown(client: EmbeddedClient, sources: Iterable[SourceInfo], watch: Observer) -> Iterator[None]:
    """Say now and then inside the block how far the passes over streamed weights have come, where there are any."""
    if isinstance(client, RayClient) or not any("pass_tokens" in info.extra for info in sources):
        yield
        return
    ended = threading.Event()

    def tell() -> None:
        pause = _FIRST_PAUSE
        while not ended.wait(pause):
            with suppress(EvalgateError):
                for progress in client.passes():
                    watch.stage(_pass(progress))
            pause = min(2 * pause, _LONGEST_PAUSE)

    thread = threading.Thread(target=tell, name="passes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_FIRST_PAUSE)


def _pass(progress: Mapping[str, Any]) -> str:
    """One pass in words: how many layers and bytes are read, and how long the rest will take."""
    read, total = (progress[name] / (1 << 30) for name in ("bytes", "total_bytes"))
    text = f"{progress['model']}: {progress['done']}/{progress['pieces']} layers, {read:.1f} of {total:.1f} GiB read"
    left = progress["seconds_left"]
    return text if left is None else f"{text}, {clock(left)} left in this pass"


def clock(seconds: float) -> str:
    """Seconds as hours, minutes and seconds: `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def client_of(server: EmbeddedServer) -> EmbeddedClient:
    """A client of a server that runs, here or on a cluster."""
    return RayClient(server) if isinstance(server, RayServer) else EmbeddedClient(server)


def scored(
    server: EmbeddedServer,
    client: EmbeddedClient,
    windows: Sequence[Window],
    ask: Ask,
    *,
    sources: Mapping[str, SourceInfo],
    names: Sequence[str],
    running: Callable[[pa.Table], NDArray[np.float64]],
    kept: PartialRun,
    texts_of: str,
) -> Generator[Batch, None, None]:
    """The batches of all windows, in order, scored by the server, or by a cluster's workers.

    sources: all models that are loaded, by spec. names: the candidates, as the server calls them. running: see
    `score_batches`. texts_of: the model whose token texts are shown later.
    """
    pool = None
    if isinstance(server, RayServer):
        client.vocabulary(texts_of)  # remembered: the server is stopped while workers score
        pool = server.pool(ask, sources, client.versions())
    return score_batches(
        windows,
        partial(ask, client),
        names=names,
        running=running,
        partial=kept,
        abandon=client.abandon,
        together=request_tokens(sources.values()),
        pool=pool,
    )


@dataclass(frozen=True)
class AskPair:
    """Asks for `with_alternatives` of these models; it can be sent to another machine."""

    names: Sequence[str]
    reference: str | None
    keep: bool = False

    def __call__(self, client: EmbeddedClient, windows: Sequence[Window]) -> pa.Table:
        """The table of some windows."""
        return with_alternatives(client, self.names, windows, reference=self.reference, keep=self.keep)


def collected(
    found: Generator[Batch, None, None],
    watch: Observer,
    *,
    worst: Worst | None = None,
    judge: Judge | None = None,
) -> tuple[pa.Table, int]:
    """All batches as one table, and how many windows it holds: fewer than all where the judge ended early.

    worst: where the batches have lists of alternatives, takes them in.
    """
    import pyarrow as pa

    tables: list[pa.Table] = []
    scored = 0
    with closing(found):
        for batch in found:
            table = batch.table
            if worst is not None:
                worst.add(table)
                table = without_lists(table)
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
    """Server rows (candidate, window, position order, checked by the client) as rows of `table.schema`."""
    return build(names, windows, {name: scores.column(name) for name in score_columns(pair=pair)})


def with_alternatives(
    client: EmbeddedClient,
    names: Sequence[str],
    windows: Sequence[Window],
    *,
    reference: str | None,
    hidden: HiddenRows | None = None,
    keep: bool = False,
) -> pa.Table:
    """The exact rows of every candidate against the reference, if any, with the likeliest ids of the worst of them.

    hidden: of the reference, where it is an output head that the server holds. keep: its hidden states in the cache.
    """
    scores = client.score(
        names, windows, reference=reference, overlap_k=OVERLAP_K, top_k=LISTED, hidden=hidden, keep=keep
    )
    table = token_table(scores, names, windows, pair=reference is not None)
    sides = {"cand": _likeliest(scores, "cand"), "ref": None if reference is None else _likeliest(scores, "ref")}
    return with_lists(table, sides)


def _likeliest(scores: pa.Table, side: str) -> Likeliest:
    ids, logprobs = (scores.column(f"{side}_{name}").combine_chunks() for name in ("top_ids", "top_logprobs"))
    shape = len(ids), ids.type.list_size
    return Likeliest(ids.flatten().to_numpy().reshape(shape), logprobs.flatten().to_numpy().reshape(shape))


def pair_scores(client: EmbeddedClient) -> noise.Ask:
    """How `evalgate.measure.noise` asks for exact scores of models against another one."""

    def ask(against: str, models: Sequence[str], part: Sequence[Window], apart: bool) -> pa.Table:
        scores = client.score(models, part, reference=against, overlap_k=OVERLAP_K, apart=apart)
        return token_table(scores, models, part, pair=True)

    return ask
