"""Recording a reference: corpus -> windows -> embedded model -> a trace, or llama.cpp's logits file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from evalgate.core import SourceInfo, Window, WindowPolicy
from evalgate.corpora import load_corpus
from evalgate.errors import UsageError
from evalgate.measure.recordings import is_recorded
from evalgate.measure.recordings.base import ROW_BYTES, split_positions, whole_rows
from evalgate.measure.request import Observer, RunRequest
from evalgate.measure.setting import shown
from evalgate.server.batches import IN_FLIGHT, batches
from evalgate.server.client import EmbeddedClient
from evalgate.server.process import EmbeddedServer
from evalgate.specs import parse
from evalgate.store.runs import check_place
from evalgate.traces import Manifest, PositionBatch, TraceMeta, TraceWriter, concatenate, write_logits_file
from evalgate.traces.layout import PARTIAL

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from evalgate.corpora.corpus import Corpus

TOP_K, TAIL_SAMPLES = 64, 16


@dataclass(frozen=True)
class RecordRequest:
    """A recording to be made.

    text: what the model is shown, as in a perplexity run of that one model; `seed` is also that of the draws, `resume`
    says whether an unfinished recording in `out` is gone on with. top_k, tail_samples: per position; K is cut to the
    vocabulary, and then nothing is drawn. full: keep float16 rows besides. format: "llama.cpp" writes a logits file.
    """

    text: RunRequest
    out: Path
    top_k: int = TOP_K
    tail_samples: int = TAIL_SAMPLES
    full: bool = False
    format: Literal["trace", "llama.cpp"] = "trace"


@dataclass(frozen=True)
class Recording:
    """What was recorded. bytes: of all files. manifest: None of a logits file."""

    out: Path
    source: SourceInfo
    policy: WindowPolicy
    windows: int
    positions: int
    bytes: int
    manifest: Manifest | None


@dataclass(frozen=True)
class _Shown:
    """A started model and the windows it is shown."""

    client: EmbeddedClient
    source: SourceInfo
    corpus: Corpus
    policy: WindowPolicy
    windows: tuple[Window, ...]
    limit: int | None


def record(request: RecordRequest, *, observer: Observer) -> Recording:
    """Record the one model of `request.text`.

    Raises UsageError for options that do not go together or a taken `out`, MismatchError where an unfinished recording
    in `out` is another one's, and the errors of the corpus, the server and the disk. What was recorded before an error
    stays, and the same request goes on after it; a logits file appears only when it is whole.
    """
    _check(request)
    with _shown(request.text, observer) as on:
        observer.start(windows=len(on.windows), positions=sum(len(w.positions) for w in on.windows))
        manifest = _record_trace(request, on, observer) if request.format == "trace" else None
        if manifest is None:
            _record_logits(request, on, observer)
    observer.finish()
    files = [request.out] if manifest is None else list(request.out.iterdir())
    return Recording(
        out=request.out,
        source=on.source,
        policy=on.policy,
        windows=len(on.windows),
        positions=sum(len(w.positions) for w in on.windows),
        bytes=sum(path.stat().st_size for path in files),
        manifest=manifest,
    )


def _check(request: RecordRequest) -> None:
    (spec,) = request.text.candidates
    if parse(spec).remote or is_recorded(spec):
        raise UsageError(f"{spec} cannot be recorded: name a model that is loaded here")
    if request.format == "llama.cpp":
        if request.text.windows != "llama.cpp":
            raise UsageError("a logits file holds llama.cpp's windows: add --windows llama.cpp")
        if request.text.positions is not None:
            raise UsageError("a logits file holds whole windows: leave out --positions")
        if request.full or (request.top_k, request.tail_samples) != (TOP_K, TAIL_SAMPLES):
            raise UsageError("a logits file holds whole rows: leave out --full, --top-k and --tail-samples")
        if request.text.seed:
            raise UsageError("a logits file holds no draws: leave out --seed")
        if not request.text.resume:
            raise UsageError("a logits file is always written anew: leave out --no-resume")
        if request.out.exists():
            raise UsageError(f"{request.out} exists and is left alone: choose another --out")
        if not request.out.resolve().parent.is_dir():
            raise UsageError(f"there is no folder for {request.out}: make it first")
        check_place(request.out)
        return
    if request.out.suffix != ".trace":
        raise UsageError(f"--out {request.out} is not recognised as a trace later: give it a name that ends in .trace")
    unfinished = request.text.resume and (request.out / PARTIAL).is_file()
    taken = request.out.exists() and (not request.out.is_dir() or any(request.out.iterdir()))
    if taken and not unfinished:
        raise UsageError(f"{request.out} exists and is left alone: choose another --out")
    check_place(request.out, inside=True)


@contextmanager
def _shown(text: RunRequest, observer: Observer) -> Iterator[_Shown]:
    observer.stage("reading the corpus")
    corpus = load_corpus(text.data, split=text.split, text_column=text.text_column)
    with (
        EmbeddedServer(
            text.candidates, device=text.device, options=["--logits", text.logits], on_stage=observer.stage
        ) as server,
        closing(EmbeddedClient(server)) as client,
    ):
        (source,) = client.models().values()
        policy, limit, cutting = shown(text, client, [source], corpus, observer)
        yield _Shown(client, source, corpus, policy, cutting.windows, limit)


def _record_trace(request: RecordRequest, on: _Shown, observer: Observer) -> Manifest:
    meta = _meta(request, on)
    resumed = (request.out / PARTIAL).is_file()
    if resumed:
        writer = TraceWriter.resume(request.out, meta, windows=on.windows)
        done = [w for w in on.windows if w.index in writer.done]
        observer.advance(windows=len(done), positions=sum(len(w.positions) for w in done), running={})
    else:
        writer = TraceWriter(request.out, meta, windows=on.windows)
    for windows, batch in _recorded(writer.remaining, on, meta):
        writer.append(batch)
        observer.advance(windows=len(windows), positions=len(batch), running={})
    return writer.finish()


def _meta(request: RecordRequest, on: _Shown) -> TraceMeta:
    """What identifies the recording; the measured noise floors are certified beside it, for they differ a little."""
    k = min(request.top_k, on.source.vocab_size)
    notes = []
    if request.text.limit is None and on.limit is not None:
        notes.append(f"the trace holds the first {on.limit} windows of the built-in corpus")
    if request.text.positions is not None:
        count = sum(len(window.positions) for window in on.windows)
        notes.append(f"the trace holds a sample of {count:,} positions (seed {request.text.seed})")
    return TraceMeta(
        source=replace(on.source, noise_floor=None, kl_floor=None),
        corpus=on.corpus.name,
        corpus_hash=on.corpus.hash,
        policy=on.policy,
        top_k=k,
        tail_samples=0 if k == on.source.vocab_size else request.tail_samples,
        seed=request.text.seed,
        full=request.full,
        versions={"evalgate": metadata.version("evalgate"), **on.client.versions()},
        certificate={"noise_floor": on.source.noise_floor, "kl_floor": on.source.kl_floor},
        notes=tuple(notes),
    )


def _recorded(
    windows: Sequence[Window], on: _Shown, meta: TraceMeta
) -> Iterator[tuple[Sequence[Window], PositionBatch]]:
    """Batches of windows with their rows, in order, the next one asked for while one is written."""
    groups = [[w] for w in windows] if meta.full else [list(windows[part]) for part in batches(windows)]
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        futures: dict[int, Future[PositionBatch]] = {}
        try:
            for number, group in enumerate(groups):
                for ahead in range(number, min(number + IN_FLIGHT, len(groups))):
                    if ahead not in futures:
                        futures[ahead] = pool.submit(_rows, on, groups[ahead], meta)
                yield group, futures[number].result()
                futures[number] = Future()  # lets go of its rows
        except BaseException:
            for future in futures.values():
                future.cancel()
            on.client.abandon()
            raise


def _rows(on: _Shown, windows: Sequence[Window], meta: TraceMeta) -> PositionBatch:
    most = max(1, ROW_BYTES // (2 * on.source.vocab_size))
    asked = [part for w in windows for part in split_positions(w, most)] if meta.full else windows
    parts = [[part] for part in asked] if meta.full else [list(asked)]
    return concatenate([_batch(on, part, meta) for part in parts])


def _batch(on: _Shown, part: Sequence[Window], meta: TraceMeta) -> PositionBatch:
    arrays: dict[str, NDArray[Any]] = on.client.record(
        on.source.name, part, top_k=meta.top_k, tail_samples=meta.tail_samples, seed=meta.seed, full=meta.full
    )
    places = [(w, p) for w in part for p in w.positions]
    return PositionBatch(
        **{
            **arrays,
            "window": np.array([w.index for w, _ in places], np.int32),
            "token": np.array([w.ids[p] for w, p in places], np.int32),
            "bytes": np.array([w.bytes_per_token[p] for w, p in places], np.int32),
        }
    )


def _record_logits(request: RecordRequest, on: _Shown, observer: Observer) -> None:
    def chunks() -> Iterator[NDArray[np.float32]]:
        for window in on.windows:
            yield whole_rows(on.client, on.source.name, window, on.source.vocab_size)
            observer.advance(windows=1, positions=len(window.positions), running={})

    tokens = np.array([window.ids for window in on.windows], dtype=np.int32)
    write_logits_file(request.out, tokens, chunks(), n_vocab=on.source.vocab_size)
