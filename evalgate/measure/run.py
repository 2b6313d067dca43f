"""The only wiring: corpus -> windows -> source -> token scores -> summary -> run folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from importlib import metadata
from typing import TYPE_CHECKING

from evalgate.core import Window
from evalgate.corpora import load_corpus
from evalgate.endpoints.budget import Budget, Spending
from evalgate.errors import UsageError
from evalgate.measure import noise
from evalgate.measure.applicable import check_applies
from evalgate.measure.embedded import asking, collect, noise_floors, score_all
from evalgate.measure.recordings import Recorded, is_recorded, open_recorded
from evalgate.measure.request import BUILTIN_LIMIT, Judge, Observer, RunRequest, silent
from evalgate.measure.result import Setting, endpoint_notes, finished_run, identity_of
from evalgate.measure.setting import (
    check_comparable,
    check_contexts,
    comparable,
    cut_notes,
    in_budget_order,
    in_document_order,
    known_notes,
    named_source,
    recorded_corpus,
    remote_policy,
    sampled,
    shown,
    tokenizer_notes,
)
from evalgate.measure.trace_endpoints import run_recorded_endpoints
from evalgate.server.batches import score_batches
from evalgate.server.client import EmbeddedClient
from evalgate.server.process import EmbeddedServer
from evalgate.specs import parse
from evalgate.stats.clustered import check_confidence
from evalgate.store.partial import partial_root, partial_run
from evalgate.store.runs import Run, check_target
from evalgate.windows import WindowSet, cut, policy, tokenized

if TYPE_CHECKING:
    import pyarrow as pa

    from evalgate.corpora.corpus import Corpus

__all__ = ["Judge", "Observer", "RunRequest", "run", "silent"]


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
        sources = {spec: named_source(models, spec) for spec in specs}
        check_comparable([sources[spec] for spec in specs])
        lead = sources[specs[0]]
        chosen, limit, cutting = shown(request, client, list(sources.values()), corpus, watch)
        other_cuts = cut_notes(client, list(sources.values()), corpus.documents, cutting.windows)
        versions = {"evalgate": metadata.version("evalgate"), **client.versions()}
        setting = Setting(sources, corpus, cutting, chosen, limit, versions)
        identity = identity_of(request, setting)
        with partial_run(identity, resume=request.resume) as partial:
            windows = in_document_order(request, cutting.windows)
            if judge is not None:
                _begin(judge, windows, lead.noise_floor)
            table, scored = score_all(request, client, sources, windows, partial, watch, judge)
            cutting = replace(cutting, windows=tuple(windows[:scored]))
            texts = _token_texts(client.vocabulary(lead.name), table)
            floors = noise_floors(request, server, client, sources, cutting.windows, table, watch)
            result = finished_run(
                request,
                replace(setting, cutting=cutting),
                table,
                identity,
                began,
                notes=[*other_cuts, *_stopped_notes(scored, len(windows))],
                floors=floors,
                token_texts=texts,
            )
            partial.discard()
    watch.finish()
    return result


def _check(request: RunRequest) -> None:
    if not request.candidates:
        raise UsageError("name at least one model to measure")
    if request.reference is None and request.kind != "ppl":
        raise UsageError("a comparison needs a reference: name one, or measure perplexity alone")
    check_confidence(request.confidence)
    if request.limit is not None and request.limit < 1:
        raise UsageError(f"--limit {request.limit} leaves nothing to measure: give at least 1 window")
    if request.context is not None:
        policy(request.windows, context=request.context, stride=request.stride)
    specs = [spec for spec in (request.reference, *request.candidates) if spec is not None]
    if not all(spec.strip() for spec in specs):
        raise UsageError("a model has an empty name: check the variable behind --ref, --cand or --model")
    for spec in request.candidates:
        if is_recorded(spec):
            raise UsageError(f"{spec} is a recording, which can only be the reference: name it with --ref")
    if request.budget != Budget() and not any(parse(spec).remote for spec in specs):
        raise UsageError("--budget limits what endpoints are asked and no source is one: use --limit or --positions")
    check_applies(request.endpoint, specs, device=request.device, logits=request.logits)
    if request.out is not None:
        check_target(request.out, overwrite=request.overwrite)


def _run_remote(request: RunRequest, corpus: Corpus, specs: list[str], watch: Observer, began: float) -> Run:
    """A run in which some side is an endpoint: every side answers window by window (evalgate.measure.endpoints)."""
    from evalgate.measure.bounds import narrowed, unknown_counts
    from evalgate.measure.endpoints import opened

    with opened(specs, request.endpoint, device=request.device, logits=request.logits, watch=watch) as sides:
        infos = sides.infos
        check_comparable([info for info in infos.values() if info.kind == "embedded"])
        chosen = remote_policy(request, sides.context)
        watch.stage(f"tokenizing {len(corpus.documents)} documents")
        limit = BUILTIN_LIMIT if request.limit is None and request.data is None else request.limit
        prefix = sides.end_id if chosen.preset == "lm-eval" else None
        documents = tokenized(corpus.documents, chosen, sides.tokenize)
        cutting = sampled(request, cut(documents, chosen, limit=limit, prefix_id=prefix))
        versions = {"evalgate": metadata.version("evalgate"), **sides.versions()}
        setting = Setting(infos, corpus, cutting, chosen, limit, versions)
        identity = {**identity_of(request, setting), "sources": sides.identity()}
        windows = in_budget_order(request, cutting.windows)
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
            notes = [*tokenizer_notes(list(infos.values())), *sides.notes, *measured.notes]
            notes += known_notes(measured.table, unknown_counts(measured.table))
            notes += endpoint_notes(request, measured, of=len(windows))
            table = narrowed(measured.table)
            result = finished_run(request, setting.answered(table), table, identity, began, notes=notes)
            if measured.whole:
                partial.discard()
    return result


def _run_recorded(request: RunRequest, recorded: Recorded, watch: Observer, began: float, judge: Judge | None) -> Run:
    """Candidates against a recorded reference, which brings its windows and needs no weights."""
    _check_recorded(request, judge)
    if any(parse(spec).remote for spec in request.candidates):
        return run_recorded_endpoints(request, recorded, watch, began)
    names = list(request.candidates)
    with (
        EmbeddedServer(
            names, device=request.device, options=["--logits", request.logits], on_stage=watch.stage
        ) as server,
        closing(EmbeddedClient(server)) as client,
    ):
        models = client.models()
        sources = {str(request.reference): recorded.info, **{spec: named_source(models, spec) for spec in names}}
        names = [sources[spec].name for spec in names]
        check_comparable(comparable(recorded.info, [sources[spec] for spec in request.candidates]))
        recorded_windows = WindowSet(recorded.windows(client, names[0]), ())
        cutting = sampled(request, recorded_windows)
        check_contexts(cutting.windows, [sources[spec] for spec in request.candidates])
        corpus = recorded_corpus(recorded, recorded_windows.windows)
        versions = {"evalgate": metadata.version("evalgate"), **client.versions()}
        setting = Setting(sources, corpus, cutting, recorded.policy, None, versions)
        identity = identity_of(request, setting) | recorded.identity()
        with partial_run(identity, resume=request.resume) as partial:
            found = score_batches(
                cutting.windows,
                lambda part: recorded.table(client, names, part),
                names=names,
                running=recorded.running,
                partial=partial,
                abandon=client.abandon,
            )
            wide, _ = collect(found, cutting.windows, watch)
            table, said = recorded.finished(wide)
            notes = [*tokenizer_notes(list(sources.values())), *said]
            floors = []
            if request.noise_floor:
                watch.stage("measuring the noise floor")
                floors = noise.shapes(asking(client), names, noise.sample(cutting.windows))
                notes.append("the noise floor is that of the candidates alone: a recording cannot be scored again")
            result = finished_run(
                request,
                setting,
                table,
                identity,
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
