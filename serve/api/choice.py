"""Continuations on their way: updates from the engine's thread, handed to the route's event loop in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from fastapi import Request

from serve.api.detokenize import Cutter
from serve.api.events import Span, apart
from serve.engine.loop import Engine
from serve.engine.runtime import ModelRuntime
from serve.engine.sequence import Ask, Finished, RowScores, Sequence
from serve.errors import ClientGone

_POLL = 0.5  # seconds between two looks at whether the client is still there


class Ending(NamedTuple):
    """How a continuation ended. stop_reason: the stop string or stop token id, None for EOS and for length."""

    reason: str
    stop_reason: str | int | None
    cached_tokens: int


class Update(NamedTuple):
    """One thing that happened: scores of the prompt (first, once), a span of text, or the end (last, once)."""

    prompt: list[RowScores] | None = None
    span: Span | None = None
    end: Ending | None = None


Updates = list[Update]


def separate(updates: Updates) -> Iterator[Updates]:
    """The same updates in as few lists as give every silent token one of its own."""
    group: Updates = []
    for update in updates:
        if update.span is None:
            group.append(update)
            continue
        for span in apart(update.span):
            silent = any(token.silent for token in span.tokens)
            if silent and group:
                yield group
                group = []
            group.append(Update(span=span))
            if silent:
                yield group
                group = []
    if group:
        yield group


class Choice:
    """One continuation. Its on_ methods run on the engine's thread; `deliver` hands updates on from there.

    live: updates is delivered as it comes, otherwise all at the end.
    """

    def __init__(
        self,
        ask: Ask,
        cutter: Cutter,
        deliver: Callable[[Updates | Exception], None],
        *,
        eos: frozenset[int] = frozenset(),
        live: bool = False,
    ) -> None:
        self.ask = ask
        self._cutter, self._deliver, self._eos, self._live = cutter, deliver, eos, live
        self._awaits_prompt = ask.prompt_logprobs is not None  # the first token may come before the prompt's scores
        self._updates: Updates = []
        self._last: int | None = None
        self._lead: Choice | None = None
        self._followers: list[Choice] = []
        self._held = False  # ended, and waits for the scores of its lead's prompt

    def share_prompt(self, lead: Choice) -> None:
        """Take the prompt's scores from a choice of the same prompt; before either is submitted."""
        if self.ask.prompt_logprobs is not None:
            self.ask = replace(self.ask, prompt_logprobs=None)
            self._lead = lead
            lead._followers.append(self)

    def on_prompt(self, rows: list[RowScores]) -> None:
        """Scores of the prompt's tokens 1.. ."""
        self._awaits_prompt = False
        self._updates.insert(0, Update(prompt=list(rows)))
        if self._held:
            self._deliver(self._updates)
        else:
            self._flush()
        for follower in self._followers:
            follower.on_prompt(rows)

    def on_token(self, token: int, row: RowScores | None) -> bool:
        """One generated token; True = a stop string is complete, end here."""
        self._last = token
        span = self._cutter.feed(token, row)
        if span.text or span.tokens:
            self._updates.append(Update(span=span))
            self._flush()
        return self._cutter.found is not None

    def on_end(self, outcome: Finished | Exception) -> None:
        """The end; what is held back is delivered with it."""
        if isinstance(outcome, Exception):
            self._deliver(outcome)
            return
        self._updates.append(Update(span=self._cutter.end()))
        self._updates.append(Update(end=Ending(outcome.reason, self._stop_reason(outcome), outcome.cached_tokens)))
        self._held = self._lead is not None and self._awaits_prompt
        if not self._held:
            self._deliver(self._updates)

    def _stop_reason(self, outcome: Finished) -> str | int | None:
        if outcome.reason != "stop":
            return None
        if self._cutter.found is not None:
            return self._cutter.found
        return None if self._last in self._eos else self._last

    def _flush(self) -> None:
        if self._live and not self._awaits_prompt:
            updates, self._updates = self._updates, []
            self._deliver(updates)


def share_prompts(choices: list[Choice], n: int) -> list[Choice]:
    """Let the first of every n choices score the prompt for the others; returns the choices."""
    for index, choice in enumerate(choices):
        if index % n:
            choice.share_prompt(choices[index - index % n])
    return choices


class Run:
    """The continuations of one request, submitted together; leaving `updates` early cancels what is unfinished."""

    def __init__(self, engine: Engine, model: ModelRuntime) -> None:
        self._engine, self._model = engine, model
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Updates | Exception]] = asyncio.Queue()
        self._open: dict[int, Sequence] = {}

    def deliverer(self, index: int) -> Callable[[Updates | Exception], None]:
        """Hands a choice's updates to this run's loop, from any thread."""

        def deliver(updates: Updates | Exception) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, updates))

        return deliver

    def start(self, choices: list[Choice]) -> None:
        """Submit all, or none where one is refused: raises BadRequest before any compute."""
        sequences = [Sequence(c.ask, c.on_prompt, c.on_token, c.on_end) for c in choices]
        self._engine.submit_together(self._model, sequences)
        self._open = dict(enumerate(sequences))

    async def updates(self, request: Request | None = None) -> AsyncIterator[tuple[int, Updates]]:
        """(choice, its updates) until every choice has ended; with a request, ClientGone when its client goes."""
        try:
            while self._open:
                index, updates = await self._next(request)
                if isinstance(updates, Exception):
                    del self._open[index]
                    raise updates
                if updates[-1].end is not None:
                    del self._open[index]
                yield index, updates
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Drop what is unfinished."""
        for sequence in self._open.values():
            self._engine.cancel(self._model, sequence)
        self._open.clear()

    async def _next(self, request: Request | None) -> tuple[int, Updates | Exception]:
        while True:
            if not self._queue.empty():  # no timer for each of hundreds of choices that ended in one step
                return self._queue.get_nowait()
            try:
                return await asyncio.wait_for(self._queue.get(), None if request is None else _POLL)
            except TimeoutError:
                if request is not None and await request.is_disconnected():
                    raise ClientGone from None
