"""One model that is loaded here, recorded: a trace, or llama.cpp's logits file."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from evalgate.core import SourceInfo, Window, WindowPolicy, counted
from evalgate.errors import ScoreError, UsageError
from evalgate.measure.contract import Kept, Measurement, Scores
from evalgate.measure.cutting import cut_for_models, read_text
from evalgate.measure.embedded import loaded
from evalgate.measure.inputs import Inputs, versions
from evalgate.measure.pace import described
from evalgate.measure.recordings import is_recorded
from evalgate.measure.recordings.base import ROW_BYTES, split_positions, whole_rows
from evalgate.measure.recordings.hidden import travelling
from evalgate.measure.request import Observer, RunRequest
from evalgate.paths import heads_folder
from evalgate.server.batches import IN_FLIGHT, request_tokens, requests
from evalgate.server.client import EmbeddedClient
from evalgate.store.files import check_place
from evalgate.store.remote import Place, here
from evalgate.traces import Manifest, PositionBatch, TraceMeta, TraceWriter, concatenate, write_logits_file
from evalgate.traces.batch import hidden_kind, row_digests
from evalgate.traces.layout import HIDDEN_K, PARTIAL, HiddenStates

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from evalgate.corpora.corpus import Corpus

TOP_K, TAIL_SAMPLES = 64, 16


@dataclass(frozen=True)
class RecordRequest:
    """A recording to be made.

    text: what the model is shown, as in a perplexity run of that one model. Its `seed` also seeds the draws; its
    `resume` resumes an unfinished recording in `out`. top_k, tail_samples: per position; K is cut to the vocabulary,
    and then nothing is drawn. full: keep float16 rows besides. hidden: keep hidden states and the output head, and no
    lists or draws. format: "llama.cpp" writes a logits file.
    """

    text: RunRequest
    out: Place
    top_k: int = TOP_K
    tail_samples: int = TAIL_SAMPLES
    full: bool = False
    hidden: bool = False
    format: Literal["trace", "llama.cpp"] = "trace"


@dataclass(frozen=True)
class Recording:
    """What was recorded. bytes: of all files, 0 until they are whole. manifest: None of a logits file."""

    out: Place
    source: SourceInfo
    policy: WindowPolicy
    windows: int
    positions: int
    bytes: int = 0
    manifest: Manifest | None = None


class _Recording(Measurement[Kept, Scores, Recording]):
    """What both formats share: one model and its windows."""

    _corpus: Corpus
    _client: EmbeddedClient
    _source: SourceInfo

    def __init__(self, request: RecordRequest) -> None:
        self.request = request

    def check(self) -> None:
        """See `Measurement`. Raises InputError for a place that cannot be written."""
        (model,) = self.request.text.candidates
        if model.remote or is_recorded(model):
            raise UsageError(f"{model} cannot be recorded: name a model that is loaded here")
        self._check_format()

    _server_options: Sequence[str] = ()

    @property
    def _out(self) -> Path:
        """Where it is recorded, on this machine. Raises UsageError for a URL (evalgate.measure.record takes those)."""
        return here(str(self.request.out))

    @abstractmethod
    def _check_format(self) -> None:
        """Refuse what this format cannot hold, and a taken place."""

    def read(self, watch: Observer) -> None:
        """See `Measurement`."""
        self._corpus = read_text(self.request.text, watch)

    @contextmanager
    def open(self, watch: Observer) -> Iterator[Sequence[SourceInfo]]:
        """See `Measurement`."""
        specs = self.request.text.candidate_specs
        with loaded(specs, self.request.text, watch, more=self._server_options) as (_, self._client):
            self._source = self._client.sources(specs)[specs[0]]
            yield [self._source]

    def windows(self, watch: Observer) -> Inputs:
        """See `Measurement`."""
        policy, limit, found = cut_for_models(self.request.text, self._client, [self._source], self._corpus, watch)
        return Inputs(
            sources={self._source.spec: self._source},
            corpus=self._corpus,
            windows=found.windows,
            skipped=found.skipped,
            policy=policy,
            limit=limit,
            notes=found.notes,
            versions=versions(self._client.versions()),
        )

    def described(self) -> dict[str, Any]:
        """See `Measurement`."""
        request = self.request
        kept = {"format": request.format, "top_k": request.top_k, "tail_samples": request.tail_samples}
        hidden = {"hidden": True} if request.hidden else {}
        return described(request.text) | kept | {"full": request.full} | hidden

    def sum_up(self, inputs: Inputs, scores: Scores, watch: Observer) -> Recording:
        """See `Measurement`."""
        return Recording(
            out=self.request.out,
            source=self._source,
            policy=inputs.policy,
            windows=len(inputs.windows),
            positions=sum(len(w.positions) for w in inputs.windows),
        )


class TraceRecording(_Recording[TraceWriter]):
    """A trace, written shard by shard, so that an unfinished one can be resumed."""

    def _check_format(self) -> None:
        out = self._out
        if out.suffix != ".trace":
            raise UsageError(f"--out {out} is not recognised as a trace later: give it a name that ends in .trace")
        unfinished = self.request.text.resume and (out / PARTIAL).is_file()
        taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
        if taken and not unfinished:
            raise UsageError(f"{out} exists and is left alone: choose another --out")
        check_place(out, inside=True)

    def resume(self, inputs: Inputs) -> AbstractContextManager[TraceWriter]:
        """See `Measurement`. Raises MismatchError where the unfinished trace is of other inputs."""
        meta = self._meta(inputs)
        if (self._out / PARTIAL).is_file():
            return nullcontext(TraceWriter.resume(self._out, meta, windows=inputs.windows))
        return nullcontext(TraceWriter(self._out, meta, windows=inputs.windows, head=self._head_file))

    _head_file: Path | None = None

    def is_new(self, kept: TraceWriter) -> bool:
        """See `Measurement`."""
        return not kept.done

    def score(self, inputs: Inputs, kept: TraceWriter, watch: Observer) -> Scores:
        """See `Measurement`. The rows go to the trace as they come."""
        done = [w for w in inputs.windows if w.index in kept.done]
        if done:
            watch.advance(windows=len(done), positions=sum(len(w.positions) for w in done), running={})
        for windows, batch in self._batches(kept.remaining, self._meta(inputs)):
            kept.append(batch)
            watch.advance(windows=len(windows), positions=len(batch), running={})
        return Scores(inputs.windows)

    def seal(self, outcome: Recording, scores: Scores, kept: TraceWriter) -> Recording:
        """See `Measurement`."""
        manifest = kept.finish()
        size = sum(path.stat().st_size for path in self._out.iterdir())
        return replace(outcome, bytes=size, manifest=manifest)

    def _meta(self, inputs: Inputs) -> TraceMeta:
        """What identifies the recording. The noise floors vary from load to load and are certified beside it."""
        request, source = self.request, self._source
        k = min(request.top_k, source.vocab_size)
        notes = []
        if request.text.limit is None and inputs.limit is not None:
            notes.append(f"the trace holds the first {counted(inputs.limit, 'window')} of {inputs.corpus.name}")
        if request.text.positions is not None:
            count = sum(len(window.positions) for window in inputs.windows)
            notes.append(f"the trace holds a sample of {count:,} positions (seed {request.text.seed})")
        return TraceMeta(
            source=replace(source, noise_floor=None, kl_floor=None, load_seconds=None),
            corpus=inputs.corpus.name,
            corpus_hash=inputs.corpus.hash,
            policy=inputs.policy,
            top_k=k,
            tail_samples=0 if k == source.vocab_size else request.tail_samples,
            seed=request.text.seed,
            full=request.full,
            versions=dict(inputs.versions),
            certificate={"noise_floor": source.noise_floor, "kl_floor": source.kl_floor},
            notes=(*notes, *inputs.notes),
        )

    def _batches(self, windows: Sequence[Window], meta: TraceMeta) -> Iterator[tuple[Sequence[Window], PositionBatch]]:
        """Batches of windows with their rows, in order; the next one is computed while one is written."""
        parts = requests(windows, request_tokens([self._source]))
        groups = [[w] for w in windows] if meta.full else [list(windows[part]) for part in parts]
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            futures: dict[int, Future[PositionBatch]] = {}
            try:
                for number, group in enumerate(groups):
                    for ahead in range(number, min(number + IN_FLIGHT, len(groups))):
                        if ahead not in futures:
                            futures[ahead] = pool.submit(self._rows, groups[ahead], meta)
                    yield group, futures[number].result()
                    futures[number] = Future()  # frees its rows
            except BaseException:
                for future in futures.values():
                    future.cancel()
                self._client.abandon()
                raise

    def _rows(self, windows: Sequence[Window], meta: TraceMeta) -> PositionBatch:
        """The rows of some windows; whole float16 rows are asked for in replies of bounded size."""
        if not meta.full:
            return self._batch(windows, meta)
        most = max(1, ROW_BYTES // (2 * self._source.vocab_size))
        return concatenate([self._batch([part], meta) for w in windows for part in split_positions(w, most)])

    def _batch(self, part: Sequence[Window], meta: TraceMeta) -> PositionBatch:
        arrays: dict[str, NDArray[Any]] = self._client.record(
            self._source.name, part, top_k=meta.top_k, tail_samples=meta.tail_samples, seed=meta.seed, full=meta.full
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


REPLAYED = 16  # one batch of windows in so many is computed once more and held against what was recorded
_MOST_REPLAYED = 4  # batches


class HiddenRecording(TraceRecording):
    """A trace of hidden states with the output head that multiplies them, replayed before it is finished."""

    def _check_format(self) -> None:
        request = self.request
        if request.full or (request.top_k, request.tail_samples) != (TOP_K, TAIL_SAMPLES):
            raise UsageError("hidden states hold the whole distributions: leave out --full, --top-k and --tail-samples")
        if request.text.logits != "float32":
            raise UsageError("hidden states are multiplied by the stored head in float32: leave out --logits model")
        super()._check_format()

    @property
    def _server_options(self) -> Sequence[str]:  # type: ignore[override]
        return ["--heads-folder", str(heads_folder())]

    def resume(self, inputs: Inputs) -> AbstractContextManager[TraceWriter]:
        """See `Measurement`. Raises ServerError where the head cannot be told apart from the model's code."""
        self._head = self._client.head(self._source.name)
        self._head_file = heads_folder() / self._head["file"]
        if not inputs.windows:
            raise UsageError("the text gives no window: there is nothing to record")
        _, rows = self._client.hidden(self._source.name, inputs.windows[:1], top_k=HIDDEN_K)
        width = np.dtype(hidden_kind(rows.dtype)).itemsize
        self._states = HiddenStates(rows.values.shape[1] // width, rows.dtype, self._head["sha256"])  # type: ignore[arg-type]
        return super().resume(inputs)

    def score(self, inputs: Inputs, kept: TraceWriter, watch: Observer) -> Scores:
        """See `Measurement`. Raises ScoreError where the stored rows and head do not give the model's own logits."""
        scores = super().score(inputs, kept, watch)
        watch.stage("replaying a sample of the recorded rows")
        trace = kept.recorded
        by_index = {window.index: window for window in inputs.windows}
        count = len(trace.manifest.shards)
        tried = min(_MOST_REPLAYED, max(1, count // REPLAYED))
        for number in sorted({place * count // tried for place in range(tried)}):
            batch = trace.shard(number)
            windows = [by_index[index] for index in dict.fromkeys(batch.window.tolist())]
            self._replay(batch, windows)
        return scores

    def _replay(self, batch: PositionBatch, windows: Sequence[Window]) -> None:
        """Hold rows as they were read back against the model, which runs once more on the same batch of windows."""
        table = self._client.score(
            [self._source.name],
            windows,
            reference=self._head["name"],
            hidden=travelling(batch, self._states),
            bits=True,
        )
        unequal = table.column("unequal").to_numpy()
        again = -table.column("ref_nll").to_numpy().astype(np.float32)
        wrong = np.flatnonzero((unequal > 0) | (again != batch.logprob))
        if len(wrong):
            row = int(wrong[0])
            raise ScoreError(
                f"{batch.where(row)}: the recorded hidden states and head give other logits than the model "
                f"({int(unequal[row]):,} of {self._source.vocab_size:,} differ), so the recording is not finished: its "
                "numbers do not repeat on this machine; record on a CPU, or without --hidden",
                window=int(batch.window[row]),
                position=int(batch.position[row]),
            )

    def _meta(self, inputs: Inputs) -> TraceMeta:
        meta = super()._meta(inputs)
        k = min(HIDDEN_K, self._source.vocab_size)
        return replace(meta, top_k=k, tail_samples=0, full=False, hidden=self._states)

    def _batch(self, part: Sequence[Window], meta: TraceMeta) -> PositionBatch:
        table, rows = self._client.hidden(self._source.name, part, top_k=meta.top_k)
        columns = {name: table.column(name).combine_chunks() for name in table.column_names}
        lists = {
            name: columns[f"cand_{name}"].flatten().to_numpy().reshape(len(rows.values), -1)
            for name in ("top_ids", "top_logprobs")
        }
        places = [(w, p) for w in part for p in w.positions]
        hidden = rows.values.copy().view(hidden_kind(rows.dtype))
        listed = np.exp(lists["top_logprobs"].astype(np.float64)).sum(axis=1)
        nothing = np.zeros((len(places), 0))
        return PositionBatch(
            window=np.array([w.index for w, _ in places], np.int32),
            position=np.array([p for _, p in places], np.int32),
            token=np.array([w.ids[p] for w, p in places], np.int32),
            bytes=np.array([w.bytes_per_token[p] for w, p in places], np.int32),
            logprob=-columns["cand_nll"].to_numpy(),
            rank=columns["cand_rank"].to_numpy(),
            entropy=np.maximum(columns["cand_entropy"].to_numpy(), 0),
            top_ids=lists["top_ids"].astype(np.int32),
            top_logprobs=lists["top_logprobs"].astype(np.float32),
            tail_mass=np.maximum(1 - listed, 0).astype(np.float32),
            tail_ids=nothing.astype(np.int32),
            tail_logprobs=nothing.astype(np.float32),
            hidden=hidden,
            digest=row_digests(hidden),
        )


class LogitsRecording(_Recording[None]):
    """llama.cpp's logits file, for its --kl-divergence-base: whole rows, always written anew."""

    def _check_format(self) -> None:
        text, out = self.request.text, self._out
        if text.windows != "llama.cpp":
            raise UsageError("a logits file holds llama.cpp's windows: add --windows llama.cpp")
        if text.positions is not None:
            raise UsageError("a logits file holds whole windows: leave out --positions")
        if (
            self.request.full
            or self.request.hidden
            or (self.request.top_k, self.request.tail_samples) != (TOP_K, TAIL_SAMPLES)
        ):
            raise UsageError("a logits file holds whole rows: leave out --full, --hidden, --top-k and --tail-samples")
        if text.seed:
            raise UsageError("a logits file holds no draws: leave out --seed")
        if not text.resume:
            raise UsageError("a logits file is always written anew: leave out --no-resume")
        if out.exists():
            raise UsageError(f"{out} exists and is left alone: choose another --out")
        if not out.resolve().parent.is_dir():
            raise UsageError(f"there is no folder for {out}: make it first")
        check_place(out)

    def resume(self, inputs: Inputs) -> AbstractContextManager[None]:
        """See `Measurement`. Nothing is resumed."""
        return nullcontext()

    def is_new(self, kept: None) -> bool:
        """See `Measurement`."""
        return True

    def score(self, inputs: Inputs, kept: None, watch: Observer) -> Scores:
        """See `Measurement`. The file is written window by window, and renamed into place when it is whole."""

        def chunks() -> Iterator[NDArray[np.float32]]:
            for window in inputs.windows:
                yield whole_rows(self._client, self._source.name, window, self._source.vocab_size)
                watch.advance(windows=1, positions=len(window.positions), running={})

        tokens = np.array([window.ids for window in inputs.windows], dtype=np.int32)
        write_logits_file(self._out, tokens, chunks(), n_vocab=self._source.vocab_size)
        return Scores(inputs.windows)

    def seal(self, outcome: Recording, scores: Scores, kept: None) -> Recording:
        """See `Measurement`."""
        return replace(outcome, bytes=self._out.stat().st_size)


def recording_of(request: RecordRequest) -> Measurement[Any, Scores, Recording]:
    """The kind of recording that a request asks for."""
    if request.format == "llama.cpp":
        return LogitsRecording(request)
    return HiddenRecording(request) if request.hidden else TraceRecording(request)
