"""The engine: one thread that owns the models and runs their steps in turn.

Each turn: take in new work, then one step of every model that has some, then one batch of the oldest score
job. Nothing else touches a model, a page or a tree.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import torch

from serve.config import EngineConfig, ModelSpec, Reading
from serve.engine.kept import KeptRows, Store, StoredModel, rows_of, stored_model
from serve.engine.pair import Columns, KnownRows, ScoreJob, ScoreWindow
from serve.engine.runtime import HeadRuntime, ModelRuntime
from serve.engine.sequence import Ask, Finished, RowScores, Sequence
from serve.engine.streamed import unified
from serve.engine.streamedjobs import announce, forget
from serve.errors import BadRequest, Draining, NotFound, OutOfMemory, ServeError
from serve.models.cache import cache_root
from serve.models.load import Failures, LoadedModel, attempt, load_models

Command = Callable[[], None]


class Job(Protocol):
    """Work on windows that the engine advances a batch at a time."""

    cancelled: bool

    @property
    def on_end(self) -> Callable[[Any], None]:
        """Gets the columns, or the error, once."""

    @property
    def finished(self) -> bool:
        """Whether every window is done."""

    def validate(self) -> None:
        """Raise BadRequest for what cannot be done."""

    def advance(self) -> None:
        """Do the next batch of windows."""

    def columns(self) -> Any:
        """All rows so far."""


class Engine:
    """Resident models behind a queue. Thread-safe: submit, score, cancel, call."""

    def __init__(self, loaded: Many[LoadedModel], config: EngineConfig, failures: Failures | None = None) -> None:
        """Prepare every model (self-check included); raises LoadFailed where one cannot be trusted.

        failures: collects those that cannot, which are then left out.
        """
        each = config.kv_memory // max(1, len(loaded))
        self.models: dict[str, ModelRuntime] = {}
        for m in loaded:
            with attempt([m.spec], failures, alone=not self.models):
                self.models[m.name] = ModelRuntime(m, config, kv_memory=each)
        self.heads: dict[str, HeadRuntime] = {}  # output heads without a body, or whose body is loaded when needed
        self.kept: dict[str, KeptRows] = {}  # hidden rows on disk, by model
        unified(list(self.models.values()))
        self.config = config
        self._inbox: queue.Queue[Command | None] = queue.Queue()
        self._jobs: deque[Job] = deque()
        self._thread: threading.Thread | None = None
        self._failure: ServeError | None = None
        self.steps = 0
        self.on_step: Callable[[str, float], None] | None = None  # model and seconds of each step, engine's thread

    @classmethod
    def load(
        cls,
        specs: Many[ModelSpec],
        config: EngineConfig,
        *,
        reading: Reading | None = None,
        names: Many[str] = (),
        failures: Failures | None = None,
    ) -> Engine:
        """Load models and make an engine of them. reading: what may be read. names: what to call the models, in order.

        failures: collects what cannot be loaded, which is then left out; the models then have no other names.
        """
        store = Store(cache_root(), config.keep_bytes)
        keeps = set() if names or (reading or Reading()) != Reading() else set(config.keep_rows)
        stored: dict[str, StoredModel] = {}
        for spec in dict.fromkeys(specs) if config.remember_checks else ():  # a check that is asked for needs the body
            with suppress(ServeError):  # what is wrong with it, loading it says
                known = stored_model(spec, config, store) if str(spec) in keeps else None
                if known is not None:
                    stored[known.name] = known
        loaded = load_models(
            [spec for spec in specs if str(spec) not in stored],
            device=config.device,
            max_model_len=config.max_model_len,
            reading=reading,
            failures=failures,
            memory=config.memory,
        )
        if names:
            loaded = [replace(model, name=name) for model, name in zip(loaded, names, strict=True)]
        engine = cls(loaded, config, failures)
        engine.heads |= stored
        engine.kept = {name: model.rows for name, model in stored.items()}
        for model in engine.models.values():
            rows = rows_of(model, store, model.loaded.spec) if model.name in keeps else None
            if rows is not None:
                engine.kept[model.name] = rows
        return engine

    @property
    def failure(self) -> ServeError | None:
        """What ended the engine's thread, where something did: nothing is answered any more."""
        return self._failure

    def start(self) -> None:
        """Start the engine's thread."""
        self._failure = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the current step; what is unfinished fails with Draining."""
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def model(self, name: str | None) -> ModelRuntime:
        """The model of that name, or the only one. Raises NotFound or BadRequest, listing the models."""
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name is None:
            raise BadRequest(f"name a model: this server has {', '.join(self.models)}", param="model")
        if name in self.heads:
            raise BadRequest(f"{name} is here with its output head alone, and only scores windows", param="model")
        if name not in self.models:
            raise NotFound(f"no model {name!r} here: this server has {', '.join(self.models)}", param="model")
        return self.models[name]

    def side(self, name: str | None) -> HeadRuntime:
        """One side of a comparison: a model, or a head alone. Raises NotFound, listing what there is."""
        return self.heads[name] if name in self.heads else self.model(name)

    @property
    def sides(self) -> list[HeadRuntime]:
        """Every model, also those whose body is not loaded."""
        return [*(model for model in self.heads.values() if model.loaded.tokenizer is not None), *self.models.values()]

    def submit(
        self,
        model: ModelRuntime,
        ask: Ask,
        *,
        on_prompt: Callable[[list[RowScores]], None],
        on_token: Callable[[int, RowScores | None], bool | None],
        on_end: Callable[[Finished | Exception], None],
    ) -> Sequence:
        """Queue a request; the callbacks run on the engine's thread. Raises BadRequest before any compute."""
        sequence = Sequence(ask, on_prompt, on_token, on_end)
        self.submit_together(model, [sequence])
        return sequence

    def submit_together(self, model: ModelRuntime, sequences: Many[Sequence]) -> None:
        """Queue requests that no step comes between, so that prompts which begin alike share their forward.

        All or none: raises BadRequest before any compute.
        """
        self._check_alive()
        for sequence in sequences:
            _check_ask(model, sequence.ask)

        def add() -> None:
            for sequence in sequences:
                model.scheduler.add(sequence)

        self._inbox.put(add)

    def cancel(self, model: ModelRuntime, sequence: Sequence) -> None:
        """Drop a request whose client has gone; its on_end is not called."""

        def drop() -> None:
            if not sequence.ended:
                sequence.cancelled = sequence.ended = True
                model.scheduler.finish(sequence)

        self._inbox.put(drop)

    def score(
        self,
        reference: HeadRuntime | None,
        candidates: Many[HeadRuntime],
        windows: Many[ScoreWindow],
        *,
        overlap_k: int,
        on_end: Callable[[Columns | Exception], None],
        apart: bool = False,
        top_k: int = 0,
        known: KnownRows | None = None,
        sends_hidden: bool = False,
        bits: bool = False,
    ) -> ScoreJob:
        """Queue a score job; on_end runs on the engine's thread. Raises BadRequest before any compute."""
        job = ScoreJob(
            reference, candidates, windows, overlap_k, on_end, apart, top_k, known, sends_hidden=sends_hidden, bits=bits
        )
        self.enqueue(job)
        return job

    def enqueue(self, job: Job) -> None:
        """Queue a job on windows; its on_end runs on the engine's thread. Raises BadRequest before any compute."""
        self._check_alive()
        job.validate()
        self._inbox.put(lambda: self._jobs.append(job))

    def call(self, command: Command) -> None:
        """Run something on the engine's thread between two steps."""
        self._inbox.put(command)

    def check_integrity(self) -> None:
        """Raise ValueError where a pool or tree is broken; call on the engine's thread or when it is stopped."""
        for model in self.models.values():
            model.scheduler.check_integrity()

    def _check_alive(self) -> None:
        """Raise what ended the engine's thread, where something did."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while self._take_in():
                self._turn()
            self._failure = Draining("the server is shutting down")
        except Exception as failure:  # a broken pool or tree: no later answer could be trusted
            self._failure = ServeError(f"the engine stopped: {failure}")
        self._shut(self._failure)

    def _turn(self) -> None:
        """One step of every busy model and one batch of the oldest score job."""
        for model in self.models.values():
            if model.scheduler.busy:
                began = time.perf_counter()
                self.steps += 1  # before the step, so that whoever it answers finds it counted
                model.step()
                if self.on_step is not None:
                    self.on_step(model.name, time.perf_counter() - began)
        if self._jobs:
            self._advance(self._jobs.popleft())

    def _advance(self, job: Job) -> None:
        if job.cancelled:
            return
        try:
            announce(job)
            job.advance()
            outcome = job.columns() if job.finished else None
        except Exception as error:
            job.on_end(as_serve_error(error))
            return
        if job.finished:
            job.on_end(outcome)
            forget(job)
        else:
            self._jobs.append(job)

    def _take_in(self) -> bool:
        """Run what is in the inbox, waiting for it only when idle; False = stop."""
        idle = not self._jobs and not any(m.scheduler.busy for m in self.models.values())
        if idle and self.config.check_idle and self._inbox.empty():
            self.check_integrity()
        try:
            while True:
                command = self._inbox.get(block=idle)
                if command is None:
                    return False
                command()
                idle = False
        except queue.Empty:
            return True

    def _shut(self, error: ServeError) -> None:
        """End everything that is unfinished with the error, what came in last included."""
        while not self._inbox.empty():
            command = self._inbox.get()
            if command is not None:
                command()
        for job in self._jobs:
            job.on_end(error)
        self._jobs.clear()
        for model in self.models.values():
            for sequence in model.scheduler.unfinished:
                model.end(sequence, error)


def as_serve_error(error: Exception) -> ServeError:
    """The server's own error for what a step raised: out of memory by name, anything else as a failed step."""
    if isinstance(error, ServeError):
        return error
    text = str(error)
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in text:
        return OutOfMemory(
            "the device is out of memory: lower --max-batch-tokens or --kv-memory, or use a smaller model or dtype"
        )
    return ServeError(f"the engine failed: {type(error).__name__}: {text.splitlines()[0] if text else ''}")


def _check_ask(model: ModelRuntime, ask: Ask) -> None:
    if not ask.prompt:
        raise BadRequest("the prompt is empty: it must have at least one token", param="prompt")
    if len(ask.prompt) + ask.max_tokens > model.context_length:
        raise BadRequest(
            f"{len(ask.prompt)} prompt tokens and {ask.max_tokens} new ones are more than the context of "
            f"{model.name} ({model.context_length})",
            param="prompt",
        )
    if model.runner.keeps_kv and len(ask.prompt) + ask.max_tokens > model.pool.capacity:
        raise BadRequest(f"the KV memory holds only {model.pool.capacity} tokens: raise --kv-memory", param="prompt")
    vocabulary = model.head.vocab_size
    wrong = next((t for t in ask.prompt if not 0 <= t < vocabulary), None)
    if wrong is not None:
        raise BadRequest(f"token id {wrong} is outside the vocabulary (0..{vocabulary - 1})", param="prompt")
    for name, k in (("logprobs", ask.logprobs), ("prompt_logprobs", ask.prompt_logprobs)):
        check_k(name, k, model.config.max_logprobs, vocabulary)


def check_k(name: str, k: int | None, limit: int, vocabulary: int) -> None:
    """Raise BadRequest for a k that is not served (`limit` = --max-logprobs); None asks for nothing."""
    if k is None:
        return
    if limit == -1:
        if k < -1 or k > vocabulary:
            raise BadRequest(f"{name} must be -1 or 0..{vocabulary}", param=name)
    elif k == -1:
        raise BadRequest(f"{name}: -1 (the whole vocabulary) needs a server started with --max-logprobs -1", param=name)
    elif not 0 <= k <= limit:
        raise BadRequest(f"{name} must be in 0..{limit}; the server's limit is set by --max-logprobs", param=name)
