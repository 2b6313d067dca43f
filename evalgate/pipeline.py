"""The only wiring: corpus -> windows -> source -> token scores -> summary -> run folder."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from evalgate import noise
from evalgate.batches import Batch, score_batches
from evalgate.client import EmbeddedClient
from evalgate.core import Document, SourceInfo, Window, WindowPolicy, table_schema
from evalgate.corpora import load_corpus
from evalgate.embedded import EmbeddedServer
from evalgate.endpoints.settings import EndpointSettings
from evalgate.errors import MismatchError, UsageError
from evalgate.partial import PartialRun, partial_root, partial_run
from evalgate.references import Recorded, is_recorded, open_recorded
from evalgate.runs import Run, check_target, write_run
from evalgate.sampling import Budget, Spending, sample_positions
from evalgate.sources import parse
from evalgate.windows import WindowSet, cut, policy

if TYPE_CHECKING:
    import pyarrow as pa

    from evalgate.corpora.corpus import Corpus
    from evalgate.summary import Group

DEFAULT_CONTEXT = 512
BUILTIN_LIMIT = 64  # windows of the built-in corpus where no limit is given
OVERLAP_K = 10
_NEIGHBOURS = "greedy_match_length"


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


def silent() -> Observer:
    """An observer that says nothing."""
    return _Silent()


def run(request: RunRequest, *, observer: Observer | None = None, judge: Judge | None = None) -> Run:
    """Measure, and write the run folder if `request.out` names one. judge: may end the run early.

    Raises the errors of evalgate.errors; nothing is left behind but answered windows, which the same request
    picks up again.
    """
    began = time.monotonic()
    watch = observer or silent()
    _check(request)
    partial_root()
    if request.reference is not None and is_recorded(request.reference):
        result = _run_recorded(request, open_recorded(request.reference), watch, began, judge)
        watch.finish()
        return result
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
        lead = sources[specs[0]]
        chosen, limit, cutting = shown(request, client, list(sources.values()), corpus, watch)
        versions = {"evalgate": metadata.version("evalgate"), **client.versions()}
        identity = _identity(request, sources, corpus, chosen, limit, versions, cutting.windows)
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


def shown(
    request: RunRequest, client: EmbeddedClient, sources: Sequence[SourceInfo], corpus: Corpus, watch: Observer
) -> tuple[WindowPolicy, int | None, WindowSet]:
    """The window policy, the limit of windows, and the windows that embedded models are shown: the first one's tokens.

    Raises the errors of `evalgate.windows`.
    """
    chosen = _window_policy(request, sources)
    watch.stage(f"tokenizing {len(corpus.documents)} documents")
    limit = BUILTIN_LIMIT if request.limit is None and request.data is None else request.limit
    prefix = sources[0].extra.get("eos_token_id") if chosen.preset == "lm-eval" else None
    documents = client.tokenize(sources[0].name, corpus.documents)
    cutting = cut(documents, chosen, limit=limit, prefix_id=int(prefix) if prefix else None)
    return chosen, limit, _sampled(request, cutting)


def _check(request: RunRequest) -> None:
    if not request.candidates:
        raise UsageError("name at least one model to measure")
    if request.limit is not None and request.limit < 1:
        raise UsageError(f"--limit {request.limit} leaves nothing to measure: give at least 1 window")
    if request.context is not None:
        policy(request.windows, context=request.context, stride=request.stride)
    specs = [spec for spec in (request.reference, *request.candidates) if spec is not None]
    for spec in request.candidates:
        if is_recorded(spec):
            raise UsageError(f"{spec} is a recording, which can only be the reference: name it with --ref")
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
        identity = {
            **_identity(request, {}, corpus, chosen, limit, versions, cutting.windows),
            "sources": sides.identity(),
        }
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


def _run_recorded(request: RunRequest, recorded: Recorded, watch: Observer, began: float, judge: Judge | None) -> Run:
    """Candidates against a recorded reference, which brings its windows and needs no weights."""
    _check_recorded(request, judge)
    names = list(request.candidates)
    with (
        EmbeddedServer(
            names, device=request.device, options=["--logits", request.logits], on_stage=watch.stage
        ) as server,
        closing(EmbeddedClient(server)) as client,
    ):
        models = client.models()
        sources = {str(request.reference): recorded.info, **{spec: _named(models, spec) for spec in names}}
        names = [sources[spec].name for spec in names]
        _check_comparable(_comparable(recorded.info, [sources[spec] for spec in request.candidates]))
        recorded_windows = WindowSet(recorded.windows(client, names[0]), ())
        cutting = _sampled(request, recorded_windows)
        _check_contexts(cutting.windows, [sources[spec] for spec in request.candidates])
        corpus = _recorded_corpus(recorded, recorded_windows.windows)
        versions = {"evalgate": metadata.version("evalgate"), **client.versions()}
        identity = (
            _identity(request, sources, corpus, recorded.policy, None, versions, cutting.windows) | recorded.identity()
        )
        with partial_run(identity, resume=request.resume) as partial:
            found = score_batches(
                cutting.windows,
                lambda part: recorded.table(client, names, part),
                names=names,
                running=recorded.running,
                partial=partial,
                abandon=client.abandon,
            )
            wide, _ = _collect(found, cutting.windows, watch)
            table, notes = recorded.finished(wide)
            floors = []
            if request.noise_floor:
                watch.stage("measuring the noise floor")
                floors = noise.shapes(_asking(client), names, noise.sample(cutting.windows))
                notes.append("the noise floor is that of the candidates alone: a recording cannot be scored again")
            result = _finish(
                request,
                table,
                sources,
                corpus,
                cutting,
                recorded.policy,
                None,
                identity,
                versions,
                began,
                notes=notes,
                floors=floors,
                token_texts=_token_texts(client.vocabulary(names[0]), table),
            )
            partial.discard()
    return result


def _check_recorded(request: RunRequest, judge: Judge | None) -> None:
    """Refuse what a recording decides by itself, naming the option."""
    given = {
        "--data": request.data,
        "--split": request.split,
        "--text-column": request.text_column,
        "--windows": None if request.windows == RunRequest.windows else request.windows,
        "--context": request.context,
        "--stride": request.stride,
        "--limit": request.limit,
    }
    named = [option for option, value in given.items() if value is not None]
    if named:
        raise UsageError(
            f"{request.reference} brings its own text and windows: leave out {', '.join(named)} "
            "(--positions N measures a sample, `evalgate trace cut` makes a smaller trace)"
        )
    if judge is not None or request.shuffle:
        raise UsageError("a sequential gate needs the exact KL of each document: leave out --sequential")
    remote = next((spec for spec in request.candidates if parse(spec).remote), None)
    if remote is not None:
        raise UsageError(f"{remote} cannot be compared with a recording: name a model that is loaded here")
    twice = next((spec for spec in request.candidates if is_recorded(spec)), None)
    if twice is not None:
        raise UsageError(f"{twice} is a recording: it can be the reference, and no candidate")


def _comparable(recorded: SourceInfo, candidates: Sequence[SourceInfo]) -> list[SourceInfo]:
    """All sides; a recording that does not name its vocabulary passes with the first candidate's name for it."""
    known = {"vocabulary_hash": candidates[0].extra.get("vocabulary_hash", "")}
    return [replace(recorded, extra={**known, **recorded.extra}), *candidates]


def _check_contexts(windows: Sequence[Window], sources: Sequence[SourceInfo]) -> None:
    longest = max(len(window.ids) for window in windows)
    for source in sources:
        if longest > source.context_length:
            raise MismatchError(
                f"the recording has windows of {longest} tokens, more than the context of {source.name} "
                f"({source.context_length}): record one with a shorter --context"
            )


def _recorded_corpus(recorded: Recorded, windows: Sequence[Window]) -> Corpus:
    """The recorded text as far as it is known: names and domains of its documents, and its hash."""
    from evalgate.corpora.corpus import Corpus

    documents = {window.document: Document(window.document, window.domain) for window in windows}
    return Corpus(recorded.corpus, tuple(documents.values()), (), recorded.corpus_hash)


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
    found = noise.shapes(_asking(client), [reference, *names], sample)
    found += noise.again(noise.WARM, _asking(client), reference, names, sample, table)
    server.stop()
    server.start()
    with closing(EmbeddedClient(server)) as fresh:
        return found + noise.again(noise.RESTART, _asking(fresh), reference, names, sample, table)


def _asking(client: EmbeddedClient) -> noise.Ask:
    def ask(against: str, models: Sequence[str], part: Sequence[Window], apart: bool) -> pa.Table:
        scores = client.score(models, part, reference=against, overlap_k=OVERLAP_K, apart=apart)
        return _token_table(scores, models, part, pair=True)

    return ask


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
    windows: Sequence[Window],
) -> dict[str, Any]:
    """Everything that changes a number of the token-score table.

    The windows stand for the whole way from text to tokens: merges, templates, BOS. The measured noise floors are
    left out: they differ a little from load to load.
    """
    return {
        "kind": "ppl" if request.reference is None else "pair",
        "reference": request.reference,
        "candidates": list(request.candidates),
        "sources": {spec: asdict(replace(info, noise_floor=None, kl_floor=None)) for spec, info in sources.items()},
        "corpus": corpus.hash,
        "windows": asdict(chosen),
        "shown": _shown_hash(windows),
        "limit": limit,
        "positions": None if request.positions is None else [request.positions, request.seed],
        "shuffle": request.seed if request.shuffle else None,
        "overlap_k": OVERLAP_K,
        "versions": versions,
    }


def _shown_hash(windows: Sequence[Window]) -> str:
    """xxh3-128 over what is shown and scored, window by window."""
    from xxhash import xxh3_128

    state = xxh3_128()
    for window in windows:
        state.update(repr(window).encode())
    return str(state.hexdigest())


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
    names = [sources[spec].name for spec in request.candidates]
    reference = sources[request.reference].name if request.reference else None
    pair = reference is not None

    def ask(part: Sequence[Window]) -> pa.Table:
        scores = client.score(names, part, reference=reference, overlap_k=OVERLAP_K)
        return _token_table(scores, names, part, pair=pair)

    running = "kl" if pair else "cand_nll"
    found = score_batches(windows, ask, names=names, running=running, partial=partial, abandon=client.abandon)
    return _collect(found, windows, watch, judge=judge, schema=table_schema(pair=pair))


def _collect(
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
