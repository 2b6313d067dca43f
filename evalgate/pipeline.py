"""The only wiring: corpus -> windows -> source -> token scores -> summary -> run folder."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from evalgate import noise
from evalgate.client import EmbeddedClient
from evalgate.core import SourceInfo, Window, WindowPolicy, table_schema
from evalgate.corpora import load_corpus
from evalgate.embedded import EmbeddedServer
from evalgate.endpoints.settings import EndpointSettings
from evalgate.errors import MismatchError, UsageError
from evalgate.partial import PartialRun, partial_run
from evalgate.runs import Run, check_target, write_run
from evalgate.sampling import Budget, Spending, sample_positions
from evalgate.sources import parse
from evalgate.windows import cut, policy

if TYPE_CHECKING:
    import pyarrow as pa

    from evalgate.corpora.corpus import Corpus
    from evalgate.summary import Group
    from evalgate.windows import WindowSet

DEFAULT_CONTEXT = 512
BUILTIN_LIMIT = 64  # windows of the built-in corpus where no limit is given
OVERLAP_K = 10
_NEIGHBOURS = "greedy_match_length"
_BATCH_TOKENS = 4096  # tokens of one score request
_IN_FLIGHT = 2  # requests at once: one is computed while the next one waits


@dataclass(frozen=True)
class RunRequest:
    """A measurement to be made; see `evalgate kl --help` for what each option means.

    reference: None for a perplexity run. candidates: specs of the models under test. data: None = the
    built-in corpus. context: None = 512, or the models' context where that is shorter. out: None = no folder.
    endpoint: how sides that we do not hold are asked. positions: a sample of that many, None = all.
    noise_floor: measure it (see evalgate.noise). shuffle: show the documents in seeded random order.
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
    endpoint: EndpointSettings = field(default_factory=EndpointSettings)
    positions: int | None = None
    budget: Budget = field(default_factory=Budget)
    noise_floor: bool = False
    shuffle: bool = False


class Judge(Protocol):
    """Who may end a run early (evalgate.sequential)."""

    def begin(self, expected: dict[str, int], *, domains: dict[str, str], noise_floor: float | None) -> None:
        """What is coming: positions by document, domain by document, and the reference's noise floor in nats."""

    def take(self, table: pa.Table) -> bool:
        """Rows of the token-score table as they come; True ends the run."""


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


def run(request: RunRequest, *, observer: Observer | None = None, judge: Judge | None = None) -> Run:
    """Measure, and write the run folder if `request.out` names one. judge: may end the run early.

    Raises the errors of evalgate.errors; nothing is left behind but answered windows, which the same request
    picks up again.
    """
    began = time.monotonic()
    watch = observer or _Silent()
    _check(request)
    watch.stage("reading the corpus")
    corpus = load_corpus(request.data, split=request.split, text_column=request.text_column)
    specs = list(dict.fromkeys([*([request.reference] if request.reference else []), *request.candidates]))
    if any(parse(spec).remote for spec in specs):
        if judge is not None:
            raise UsageError("a sequential gate needs models that are loaded here: leave out --sequential")
        result = _run_remote(request, corpus, specs, watch, began)
        watch.finish()
        return result
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
        cutting = _sampled(request, cutting)
        versions = {"evalgate": metadata.version("evalgate"), **client.versions()}
        identity = _identity(request, sources, corpus, chosen, limit, versions)
        with partial_run(identity, resume=request.resume) as partial:
            windows = _in_document_order(request, cutting.windows)
            if judge is not None:
                _begin(judge, windows, lead.noise_floor)
            table, scored = _score_all(request, client, sources, windows, partial, watch, judge)
            cutting = replace(cutting, windows=tuple(windows[:scored]))
            texts = _token_texts(client.vocabulary(lead.name), table)
            floors = _noise_floors(request, server, client, sources, cutting.windows, table, watch)
            result = _finish(
                request,
                table,
                sources,
                corpus,
                cutting,
                chosen,
                limit,
                identity,
                versions,
                began,
                notes=_stopped_notes(scored, len(windows)),
                floors=floors,
                token_texts=texts,
            )
            partial.discard()
    watch.finish()
    return result


def _check(request: RunRequest) -> None:
    if not request.candidates:
        raise UsageError("name at least one model to measure")
    if request.limit is not None and request.limit < 1:
        raise UsageError(f"--limit {request.limit} leaves nothing to measure: give at least 1 window")
    specs = [spec for spec in (request.reference, *request.candidates) if spec is not None]
    if request.budget != Budget() and not any(parse(spec).remote for spec in specs):
        raise UsageError("--budget limits what endpoints are asked and no source is one: use --limit or --positions")
    if request.out is not None:
        check_target(request.out, overwrite=request.overwrite)


def _run_remote(request: RunRequest, corpus: Corpus, specs: list[str], watch: Observer, began: float) -> Run:
    """A run in which some side is an endpoint: every side answers window by window (evalgate.remote)."""
    from evalgate.bounds import narrowed, unknown_counts
    from evalgate.remote import opened

    with opened(specs, request.endpoint, device=request.device, logits=request.logits, watch=watch) as sides:
        infos = sides.infos
        _check_comparable([info for info in infos.values() if info.kind == "embedded"])
        chosen = _remote_policy(request, sides.context)
        watch.stage(f"tokenizing {len(corpus.documents)} documents")
        limit = BUILTIN_LIMIT if request.limit is None and request.data is None else request.limit
        prefix = sides.end_id if chosen.preset == "lm-eval" else None
        cutting = _sampled(request, cut(sides.tokenize(corpus.documents), chosen, limit=limit, prefix_id=prefix))
        versions = {"evalgate": metadata.version("evalgate"), **sides.versions()}
        identity = {**_identity(request, {}, corpus, chosen, limit, versions), "sources": sides.identity()}
        windows = _in_budget_order(request, cutting.windows)
        watch.start(windows=len(windows), positions=sum(len(w.positions) for w in windows))
        with partial_run(identity, resume=request.resume) as partial:
            measured = sides.score(
                request.reference,
                request.candidates,
                windows,
                folder=partial.folder,
                spending=Spending(request.budget),
                advance=lambda window, means: watch.advance(windows=1, positions=len(window.positions), running=means),
            )
            notes = [*sides.notes, *measured.notes, *_known_notes(measured.table, unknown_counts(measured.table))]
            if not measured.whole:
                notes.append(f"the budget ended after {measured.windows} of {len(windows)} windows, drawn at random")
            if request.noise_floor:
                notes.append("the noise floor was not measured: an endpoint cannot be restarted or rebatched from here")
            table = narrowed(measured.table)
            asked = set(table.column("window").to_pylist())
            cutting = replace(cutting, windows=tuple(w for w in cutting.windows if w.index in asked))
            result = _finish(
                request, table, infos, corpus, cutting, chosen, limit, identity, versions, began, notes=notes
            )
            if measured.whole:
                partial.discard()
    return result


def _known_notes(table: pa.Table, unknown: dict[str, int]) -> list[str]:
    return [
        f"{name} is not known at {count:,} of {table.num_rows:,} positions, which count as intervals: a larger "
        "--top-k knows more"
        for name, count in unknown.items()
    ]


def _remote_policy(request: RunRequest, longest: int | None) -> WindowPolicy:
    """As `_window_policy`, where some contexts are not known and one token is generated besides."""
    context = request.context or min(DEFAULT_CONTEXT, longest or DEFAULT_CONTEXT)
    if longest is not None and context > longest:
        raise UsageError(f"--context {context} is too long: the sources take windows of {longest} tokens at most")
    return policy(request.windows, context=context, stride=request.stride)


def _sampled(request: RunRequest, cutting: WindowSet) -> WindowSet:
    if request.positions is None:
        return cutting
    return replace(cutting, windows=sample_positions(cutting.windows, request.positions, seed=request.seed))


def _in_document_order(request: RunRequest, windows: Sequence[Window]) -> list[Window]:
    """As they stand, or with their documents in seeded random order, each document's windows together."""
    if not request.shuffle:
        return list(windows)
    from evalgate.sequential import shuffled

    owned: dict[str, list[Window]] = {}
    for window in windows:
        owned.setdefault(window.document, []).append(window)
    return [window for name in shuffled(list(owned), seed=request.seed) for window in owned[name]]


def _begin(judge: Judge, windows: Sequence[Window], noise_floor: float | None) -> None:
    expected: dict[str, int] = {}
    for window in windows:
        expected[window.document] = expected.get(window.document, 0) + len(window.positions)
    judge.begin(expected, domains={w.document: w.domain for w in windows}, noise_floor=noise_floor)


def _stopped_notes(scored: int, windows: int) -> list[str]:
    if scored == windows:
        return []
    return [
        f"stopped after {scored} of {windows} windows, when the sequential verdict had fallen: intervals of the other "
        "figures are for a fixed size and do not know that"
    ]


def _token_texts(vocabulary: Sequence[bytes], table: pa.Table) -> dict[int, str]:
    """The decoded text of every token id in the table; bytes that are no whole character become U+FFFD."""
    ids = sorted(table.column("token").unique().to_pylist())
    return {i: vocabulary[i].decode("utf-8", "replace") for i in ids}


def _noise_floors(
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

    def asking(of: EmbeddedClient) -> noise.Ask:
        def ask(against: str, models: Sequence[str], part: Sequence[Window], apart: bool) -> pa.Table:
            scores = of.score(models, part, reference=against, overlap_k=OVERLAP_K, apart=apart)
            return _token_table(scores, models, part, pair=True)

        return ask

    found = noise.shapes(asking(client), [reference, *names], sample)
    found += noise.again(noise.WARM, asking(client), reference, names, sample, table)
    server.stop()
    server.start()
    with closing(EmbeddedClient(server)) as fresh:
        return found + noise.again(noise.RESTART, asking(fresh), reference, names, sample, table)


def _in_budget_order(request: RunRequest, windows: Sequence[Window]) -> list[Window]:
    """As they stand, or shuffled where a budget may end the run early: what was answered is then a random sample."""
    if request.budget == Budget():
        return list(windows)
    import numpy as np

    return [windows[i] for i in np.random.default_rng(request.seed).permutation(len(windows))]


def _named(models: dict[str, SourceInfo], spec: str) -> SourceInfo:
    found = next((info for info in models.values() if spec in (info.spec, info.name)), None)
    if found is None:
        raise UsageError(f"the embedded server did not load {spec}: it has {', '.join(models)}")
    return found


def _check_comparable(sources: Sequence[SourceInfo]) -> None:
    """Token-level figures need one vocabulary: same ids for same tokens, same number of rows."""
    for other in sources[1:]:
        lead = sources[0]
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
        "positions": None if request.positions is None else [request.positions, request.seed],
        "shuffle": request.seed if request.shuffle else None,
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
    judge: Judge | None = None,
) -> tuple[pa.Table, int]:
    """The token-score table of all windows, batch by batch; batches answered earlier are taken over.

    Ends early where the judge says so; gives the number of windows scored beside the table.
    """
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
                if judge is not None and judge.take(table):
                    windows = windows[: batch.stop]
                    break
            for future in futures.values():
                future.cancel()
        except BaseException:
            for future in futures.values():
                future.cancel()
            client.close()  # ends the requests under way
            raise
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks(), len(windows)


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
    *,
    notes: Sequence[str] = (),
    floors: Sequence[noise.Itself] = (),
    token_texts: dict[int, str] | None = None,
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
    if request.positions is not None:
        groups = [(name, _unordered(one), [_unordered(d) for d in many]) for name, one, many in groups]
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
            s.Comparison(
                candidate=s.Source(**asdict(by_name[name])),
                overall=overall,
                domains=domains,
                noise=noise.noise(
                    floors,
                    reference=reference.name,
                    candidate=name,
                    overall=overall,
                    tie=reference.noise_floor,
                    seed=request.seed,
                    confidence=request.confidence,
                )
                if reference and floors
                else None,
            )
            for name, overall, domains in groups
        ],
        seconds=time.monotonic() - began,
        versions=versions,
        notes=[*_notes(request, limit, list(sources.values())), *notes],
    )
    manifest = {
        "request": {
            **asdict(replace(request, endpoint=EndpointSettings())),
            "endpoint": request.endpoint.public(),
            "out": str(request.out) if request.out else None,
        },
        "identity": identity,
        "seed": request.seed,
        "noise_floor": {spec: info.noise_floor for spec, info in sources.items()},
        "created": summary.created,
    }
    if request.out is None:
        return Run(summary=summary, table=table, manifest=manifest, token_texts=token_texts)
    return write_run(
        request.out,
        manifest=manifest,
        table=table,
        summary=summary,
        token_texts=token_texts,
        overwrite=request.overwrite,
    )


def _unordered(group: Group) -> Group:
    """A group without the metric that counts neighbouring positions: a sample of positions has no neighbours."""
    return group.model_copy(update={"metrics": {n: m for n, m in group.metrics.items() if n != _NEIGHBOURS}})


def _notes(request: RunRequest, limit: int | None, sources: Sequence[SourceInfo]) -> list[str]:
    notes = []
    if request.positions is not None:
        notes.append(f"{request.positions:,} positions were sampled, each document by its share (seed {request.seed})")
    hashed = [source for source in sources if source.tokenizer_hash]
    for other in hashed[1:]:
        if other.tokenizer_hash != hashed[0].tokenizer_hash:
            notes.append(f"{other.name} would split text differently: both were shown {hashed[0].name}'s tokens")
    if request.limit is None and limit is not None:
        notes.append(f"the built-in corpus is cut to {limit} windows by default: --limit N measures more")
    return notes
