"""POST /v1/completions: prompt logprobs and continuations, in OpenAI's shape with vLLM's extensions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from serve.api.asks import (
    MAX_CHOICES,
    Scoring,
    check_fields,
    check_size,
    check_text,
    eos_ids,
    make_ask,
    stop_ids,
    stop_strings,
    widest,
)
from serve.api.choice import Choice, Ending, Run, Updates, separate, share_prompts
from serve.api.detokenize import Cutter, Detokenizer
from serve.api.entries import Names, Place, legacy, prompt_entries
from serve.api.events import Sampled
from serve.api.prompt import Prompt
from serve.api.replies import CompletionChunk, CompletionReply
from serve.api.sending import EventStream, streamed
from serve.api.usage import Usage
from serve.engine.runtime import ModelRuntime
from serve.engine.sequence import RowScores
from serve.errors import BadRequest
from serve.state import ServerState
from serve.wire import CompletionRequest


def router(state: ServerState) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/v1/completions", response_model=CompletionReply, responses=streamed(CompletionChunk))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Scores of the prompt's tokens (`prompt_logprobs`, `echo`), of generated ones (`logprobs`), or text alone.

        With `stream`, chunks of the same shape as server-sent events: each choice's echo and prompt logprobs
        come with its first chunk.
        """
        model = state.engine.model(body.model)
        ks = {"logprobs": body.logprobs, "prompt_logprobs": body.prompt_logprobs}
        check_fields(model, body, ks)
        prompts = await run_in_threadpool(_prompts, model, body)
        _check_size(model, body, [len(prompt.ids) for prompt in prompts])
        reply = _Reply(model, body, prompts)
        run = Run(state.engine, model)
        run.start(share_prompts([_choice(reply, run, index) for index in range(len(prompts) * body.n)], body.n))
        state.metrics.count_prompts(model.name, sum(len(prompt.ids) for prompt in prompts))
        if body.stream:
            return EventStream(_stream(state, reply, run))
        async for index, updates in run.updates(request):
            reply.gather(index, updates)
        reply.count(state)
        return state.json(await run_in_threadpool(reply.whole))

    return routes


def _prompts(model: ModelRuntime, body: CompletionRequest) -> list[Prompt]:
    """The prompts. Text gets BOS where the tokenizer adds one; ids are taken as they are."""
    given: list[Any] = [body.prompt] if isinstance(body.prompt, str) or _is_ids(body.prompt) else list(body.prompt)
    if not given:
        raise BadRequest("'prompt' is an empty list", param="prompt")
    if len(given) * body.n > MAX_CHOICES:
        raise BadRequest(f"{len(given)} prompts times n = {body.n} are more than {MAX_CHOICES} choices", param="n")
    tokenizer = model.loaded.tokenizer
    prompts = []
    for prompt in given:
        if isinstance(prompt, str):
            check_text(model, len(prompt), "prompt")
            prompts.append(Prompt.of_text(tokenizer, prompt, add_bos=body.add_special_tokens))
        else:
            wrong = next((t for t in prompt if t >= model.head.vocab_size), None)
            if wrong is not None:
                raise BadRequest(f"'prompt': token id {wrong} is outside the vocabulary", param="prompt")
            prompts.append(Prompt.of_ids(tokenizer, prompt))
    return prompts


def _check_size(model: ModelRuntime, body: CompletionRequest, lengths: list[int]) -> None:
    check_size(model, "prompt_logprobs", sum(lengths), body.prompt_logprobs)
    echoed = sum(lengths) * body.n if body.echo else 0
    written = 0 if body.stream else len(lengths) * body.n * body.max_tokens
    check_size(model, "logprobs", echoed + written, body.logprobs)


def _is_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)


def _choice(reply: _Reply, run: Run, index: int) -> Choice:
    model, body = reply.model, reply.body
    echoed = body.logprobs if body.echo else None
    ask = make_ask(
        model,
        body,
        reply.prompt(index).ids,
        max_tokens=body.max_tokens,
        scoring=Scoring(body.logprobs, widest(body.prompt_logprobs, echoed)),
        choice=index % body.n,
    )
    detokenizer = Detokenizer(model.loaded.tokenizer, hide=stop_ids(model, body), hide_special=body.skip_special_tokens)
    cutter = Cutter(
        detokenizer, stop=stop_strings(body), min_tokens=body.min_tokens, include=body.include_stop_str_in_output
    )
    return Choice(ask, cutter, run.deliverer(index), eos=eos_ids(model), live=body.stream)


@dataclass
class _Part:
    """What is known of one choice and not yet sent (streaming), or all of it."""

    text: str = ""
    tokens: list[Sampled] = field(default_factory=list)
    prompt_rows: list[RowScores] | None = None
    end: Ending | None = None
    begun: bool = False

    def add(self, updates: Updates) -> None:
        for update in updates:
            if update.prompt is not None:
                self.prompt_rows = update.prompt
            if update.span is not None:
                self.text += update.span.text
                self.tokens.extend(update.span.tokens)
            if update.end is not None:
                self.end = update.end


class _Reply:
    """Writes one request's choices, whole or in chunks, from the same parts."""

    def __init__(self, model: ModelRuntime, body: CompletionRequest, prompts: list[Prompt]) -> None:
        self.model, self.body, self._prompts = model, body, prompts
        self._names = Names(model.loaded.tokenizer, as_ids=body.return_tokens_as_token_ids)
        self._parts = [_Part() for _ in range(len(prompts) * body.n)]
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }
        self.usage = Usage(prompt=sum(len(prompt.ids) for prompt in prompts))

    def prompt(self, index: int) -> Prompt:
        """The prompt of a choice."""
        return self._prompts[index // self.body.n]

    def gather(self, index: int, updates: Updates) -> None:
        """Take in a choice's updates."""
        part = self._parts[index]
        before = len(part.tokens)
        part.add(updates)
        self.usage.completion += len(part.tokens) - before
        if part.end is not None and index % self.body.n == 0:
            self.usage.cached += part.end.cached_tokens

    def count(self, state: ServerState) -> None:
        """Tell the metrics."""
        state.metrics.count_generated(self.model.name, self.usage.completion, cached=self.usage.cached)

    def whole(self) -> dict[str, Any]:
        """The reply."""
        choices = [self._write(index) for index in range(len(self._parts))]
        return {**self._head, "choices": choices, "usage": self.usage.body()}

    def chunk(self, index: int, updates: Updates) -> dict[str, Any]:
        """One chunk of a stream: a choice's updates alone."""
        self.gather(index, updates)
        written = self._write(index)
        self._parts[index] = _Part(begun=True)
        chunk: dict[str, Any] = {**self._head, "choices": [written]}
        options = self.body.stream_options
        if options is not None and options.continuous_usage_stats:
            chunk["usage"] = self.usage.body()
        elif options is not None and options.include_usage:
            chunk["usage"] = None
        return chunk

    def last_chunk(self) -> dict[str, Any]:
        """The chunk with the usage."""
        return {**self._head, "choices": [], "usage": self.usage.body()}

    def _write(self, index: int) -> dict[str, Any]:
        body, part, prompt = self.body, self._parts[index], self.prompt(index)
        first = not part.begun
        choice: dict[str, Any] = {
            "index": index,
            "text": (prompt.text if body.echo and first else "") + part.text,
            "finish_reason": None if part.end is None else part.end.reason,
            "stop_reason": None if part.end is None else part.end.stop_reason,
            "logprobs": None,
        }
        if body.logprobs is not None:
            places = self._echo(prompt, part) if body.echo and first else []
            places += [Place(t.token, t.row, prompt.characters + t.offset) for t in part.tokens]
            choice["logprobs"] = legacy(self._names, places, body.logprobs)
        if body.prompt_logprobs is not None and first:
            choice["prompt_logprobs"] = prompt_entries(self._names, part.prompt_rows or (), body.prompt_logprobs)
        if body.return_token_ids:
            choice["token_ids"] = [token.token for token in part.tokens]
            if first:
                choice["prompt_token_ids"] = list(prompt.ids)
        return choice

    @staticmethod
    def _echo(prompt: Prompt, part: _Part) -> list[Place]:
        rows: list[RowScores | None] = [None, *(part.prompt_rows or ())]
        return [Place(*place) for place in zip(prompt.ids, rows, prompt.offsets, strict=True)]


async def _stream(state: ServerState, reply: _Reply, run: Run) -> AsyncIterator[dict[str, Any]]:
    async for index, updates in run.updates():
        for part in separate(updates):
            yield reply.chunk(index, part)
    reply.count(state)
    options = reply.body.stream_options
    if options is not None and options.include_usage:
        yield reply.last_chunk()
