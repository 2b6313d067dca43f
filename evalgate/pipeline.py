"""The only wiring: corpus -> windows -> source -> token scores -> summary -> run folder."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from evalgate.client import EmbeddedClient
from evalgate.core import SourceInfo, Window, WindowPolicy, table_schema
from evalgate.corpora import load_corpus
from evalgate.embedded import EmbeddedServer
from evalgate.errors import MismatchError, UsageError
from evalgate.partial import PartialRun, partial_run
from evalgate.runs import Run, check_target, write_run
from evalgate.windows import cut, policy

if TYPE_CHECKING:
    import pyarrow as pa

    from evalgate.corpora.corpus import Corpus
    from evalgate.windows import WindowSet

DEFAULT_CONTEXT = 512
BUILTIN_LIMIT = 64  # windows of the built-in corpus where no limit is given
OVERLAP_K = 10
_BATCH_TOKENS = 4096  # tokens of one score request
_IN_FLIGHT = 2  # requests at once: one is computed while the next one waits


@dataclass(frozen=True)
class RunRequest:
    """A measurement to be made; see `evalgate kl --help` for what each option means.

    reference: None for a perplexity run. candidates: specs of the models under test. data: None = the
    built-in corpus. context: None = 512, or the models' context where that is shorter. out: None = no folder.
    """

    kind: Literal["kl", "agree", "ppl"]
    reference: str | None
    candidates: tuple[str, ...]
    data: str | None = None
    split: str | None = None
    text_column: str | None = None
    windows: str = "disjoint"
    context: int | None = None
    stride: int | None = None
    limit: int | None = None
    seed: int = 0
    confidence: float = 0.95
    device: str = "auto"
    logits: Literal["float32", "model"] = "float32"
    out: Path | None = None
    resume: bool = True
    overwrite: bool = False


class Observer(Protocol):
    """Who watches a run."""

    def stage(self, text: str) -> None:
        """What is being done before scoring."""

    def start(self, *, windows: int, positions: int) -> None:
        """Scoring begins; totals."""

    def advance(self, *, windows: int, positions: int, running: dict[str, float]) -> None:
        """A batch is done: its counts, and the running mean (KL, or nll in a perplexity run) by candidate."""

    def finish(self) -> None:
        """The run has ended."""


class _Silent:
    def stage(self, text: str) -> None: ...
    def start(self, *, windows: int, positions: int) -> None: ...
    def advance(self, *, windows: int, positions: int, running: dict[str, float]) -> None: ...
    def finish(self) -> None: ...


def run(request: RunRequest, *, observer: Observer | None = None) -> Run:
    """Measure, and write the run folder if `request.out` names one.

    Raises the errors of evalgate.errors; nothing is left behind but answered windows, which the same request
    picks up again.
    """
    began = time.monotonic()
    watch = observer or _Silent()
    _check(request)
    watch.stage("reading the corpus")
    corpus = load_corpus(request.data, split=request.split, text_column=request.text_column)
    specs = list(dict.fromkeys([*([request.reference] if request.reference else []), *request.candidates]))
    with (
        EmbeddedServer(
            specs, device=request.device, options=["--logits", request.logits], on_stage=watch.stage
        ) as server,
        closing(EmbeddedClient(server)) as client,
    ):
        models = client.models()
        sources = {spec: _named(models, spec) for spec in specs}
        _check_comparable([sources[spec] for spec in specs])
        chosen = _window_policy(request, list(sources.values()))
        watch.stage(f"tokenizing {len(corpus.documents)} documents")
        lead = sources[specs[0]]
        limit = BUILTIN_LIMIT if request.limit is None and request.data is None else request.limit
        prefix = lead.extra.get("eos_token_id") if chosen.preset == "lm-eval" else None
        cutting = cut(
            client.tokenize(lead.name, corpus.documents),
            chosen,
            limit=limit,
            prefix_id=int(prefix) if prefix else None,
        )
        versions = {"evalgate": metadata.version("evalgate"), **client.versions()}
        identity = _identity(request, sources, corpus, chosen, limit, versions)
        with partial_run(identity, resume=request.resume) as partial:
            table = _score_all(request, client, sources, cutting.windows, partial, watch)
            result = _finish(request, table, sources, corpus, cutting, chosen, limit, identity, versions, began)
            partial.discard()
    watch.finish()
    return result


def _check(request: RunRequest) -> None:
    if not request.candidates:
        raise UsageError("name at least one model to measure")
    if request.limit is not None and request.limit < 1:
        raise UsageError(f"--limit {request.limit} leaves nothing to measure: give at least 1 window")
    for spec in (request.reference, *request.candidates):
        if spec is not None and spec.startswith(("http://", "https://")):
            raise UsageError(f"{spec} is an endpoint: this version measures models that it can load itself")
    if request.out is not None:
        check_target(request.out, overwrite=request.overwrite)


def _named(models: dict[str, SourceInfo], spec: str) -> SourceInfo:
    found = next((info for info in models.values() if spec in (info.spec, info.name)), None)
    if found is None:
        raise UsageError(f"the embedded server did not load {spec}: it has {', '.join(models)}")
    return found


def _check_comparable(sources: Sequence[SourceInfo]) -> None:
    """Token-level figures need one vocabulary: same ids for same tokens, same number of rows."""
    lead = sources[0]
    for other in sources[1:]:
        if other.extra.get("vocabulary_hash") != lead.extra.get("vocabulary_hash"):
            raise MismatchError(
                f"{lead.name} and {other.name} have different vocabularies (by content), so that their tokens cannot "
                "be compared one by one: compare bits_per_byte of two `evalgate ppl` runs instead"
            )
        if other.vocab_size != lead.vocab_size:
            raise MismatchError(
                f"{lead.name} has {lead.vocab_size} output rows and {other.name} has {other.vocab_size}: cutting to "
                "the smaller one would renormalise silently, so pad or export both alike"
            )


def _window_policy(request: RunRequest, sources: Sequence[SourceInfo]) -> WindowPolicy:
    shortest = min(sources, key=lambda s: s.context_length)
    context = request.context or min(DEFAULT_CONTEXT, shortest.context_length)
    if context > shortest.context_length:
        raise UsageError(
            f"--context {context} is longer than the context of {shortest.name} ({shortest.context_length} tokens)"
        )
    return policy(request.windows, context=context, stride=request.stride)


def _identity(
    request: RunRequest,
    sources: dict[str, SourceInfo],
    corpus: Corpus,
    chosen: WindowPolicy,
    limit: int | None,
    versions: dict[str, str],
) -> dict[str, Any]:
    """Everything that changes a number of the token-score table."""
    return {
        "kind": "ppl" if request.reference is None else "pair",
        "reference": request.reference,
        "candidates": list(request.candidates),
        "sources": {spec: asdict(info) for spec, info in sources.items()},
        "corpus": corpus.hash,
        "windows": asdict(chosen),
        "limit": limit,
        "overlap_k": OVERLAP_K,
        "versions": versions,
    }


def _score_all(
    request: RunRequest,
    client: EmbeddedClient,
    sources: dict[str, SourceInfo],
    windows: Sequence[Window],
    partial: PartialRun,
    watch: Observer,
) -> pa.Table:
    """The token-score table of all windows, batch by batch; batches answered earlier are taken over."""
    import pyarrow as pa

    names = [sources[spec].name for spec in request.candidates]
    reference = sources[request.reference].name if request.reference else None
    batches = list(_batches(windows))
    known = partial.shards()
    watch.start(windows=len(windows), positions=sum(len(w.positions) for w in windows))
    mean = _RunningMean("cand_nll" if reference is None else "kl")
    tables: list[pa.Table] = []
    with ThreadPoolExecutor(_IN_FLIGHT) as pool:
        futures: dict[int, Future[pa.Table]] = {}

        def ask(number: int) -> None:
            if number < len(batches) and known.get(batches[number].start, (None,))[0] != batches[number].stop:
                part = windows[batches[number].start : batches[number].stop]
                futures[number] = pool.submit(client.score, names, part, reference=reference, overlap_k=OVERLAP_K)

        try:
            for number in range(min(_IN_FLIGHT, len(batches))):
                ask(number)
            for number, batch in enumerate(batches):
                part = windows[batch.start : batch.stop]
                if number in futures:
                    table = _token_table(futures.pop(number).result(), names, part, pair=reference is not None)
                    partial.keep(batch.start, batch.stop, table)
                else:
                    table = known[batch.start][1].cast(table_schema(pair=reference is not None))
                ask(number + _IN_FLIGHT)
                tables.append(table)
                watch.advance(
                    windows=len(part), positions=sum(len(w.positions) for w in part), running=mean.add(table, names)
                )
        except BaseException:
            for future in futures.values():
                future.cancel()
            client.close()  # ends the requests under way
            raise
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks()


def _batches(windows: Sequence[Window]) -> Iterator[slice]:
    """Windows [start, stop) that fill one request."""
    start, tokens = 0, 0
    for number, window in enumerate(windows):
        if number > start and tokens + len(window.ids) > _BATCH_TOKENS:
            yield slice(start, number)
            start, tokens = number, 0
        tokens += len(window.ids)
    if start < len(windows):
        yield slice(start, len(windows))


class _RunningMean:
    """Mean of one column so far, by candidate."""

    def __init__(self, column: str) -> None:
        self._column = column
        self._sums: dict[str, float] = {}
        self._count = 0

    def add(self, table: pa.Table, names: Sequence[str]) -> dict[str, float]:
        values = table.column(self._column).to_numpy().astype("float64")
        each = len(values) // len(names)
        for number, name in enumerate(names):
            self._sums[name] = self._sums.get(name, 0.0) + float(values[number * each : (number + 1) * each].sum())
        self._count += each
        return {name: total / self._count for name, total in self._sums.items()}


def _token_table(scores: pa.Table, names: Sequence[str], windows: Sequence[Window], *, pair: bool) -> pa.Table:
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


def _finish(
    request: RunRequest,
    table: pa.Table,
    sources: dict[str, SourceInfo],
    corpus: Corpus,
    cutting: WindowSet,
    chosen: WindowPolicy,
    limit: int | None,
    identity: dict[str, Any],
    versions: dict[str, str],
    began: float,
) -> Run:
    """Summarize the table, and write the folder if one is asked for."""
    from evalgate import summary as s
    from evalgate.stats.summarize import summarize

    reference = sources[request.reference] if request.reference else None
    by_name = {sources[spec].name: sources[spec] for spec in request.candidates}
    groups = summarize(
        table,
        kind=request.kind,
        noise_floor=reference.noise_floor if reference else None,
        seed=request.seed,
        confidence=request.confidence,
    )
    skipped = [*corpus.skipped, *cutting.skipped]
    summary = s.Summary(
        evalgate_version=versions["evalgate"],
        kind=request.kind,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seed=request.seed,
        corpus=s.Corpus(
            name=corpus.name,
            hash=corpus.hash,
            documents=len(corpus.documents),
            tokens=sum(len(w.ids) for w in cutting.windows),
            skipped=[s.SkippedDocument(name=x.name, reason=x.reason) for x in skipped],
            window_preset=chosen.preset,
            context=chosen.context,
            stride=chosen.stride,
            limit=limit,
        ),
        reference=s.Source(**asdict(reference)) if reference else None,
        comparisons=[
            s.Comparison(candidate=s.Source(**asdict(by_name[name])), overall=overall, domains=domains)
            for name, overall, domains in groups
        ],
        seconds=time.monotonic() - began,
        versions=versions,
        notes=_notes(request, limit, list(sources.values())),
    )
    manifest = {
        "request": {**asdict(request), "out": str(request.out) if request.out else None},
        "identity": identity,
        "seed": request.seed,
        "noise_floor": {spec: info.noise_floor for spec, info in sources.items()},
        "created": summary.created,
    }
    if request.out is None:
        return Run(summary=summary, table=table, manifest=manifest)
    return write_run(request.out, manifest=manifest, table=table, summary=summary, overwrite=request.overwrite)


def _notes(request: RunRequest, limit: int | None, sources: Sequence[SourceInfo]) -> list[str]:
    notes = []
    for other in sources[1:]:
        if other.tokenizer_hash != sources[0].tokenizer_hash:
            notes.append(f"{other.name} would split text differently: both were shown {sources[0].name}'s tokens")
    if request.limit is None and limit is not None:
        notes.append(f"the built-in corpus is cut to {limit} windows by default: --limit N measures more")
    return notes
