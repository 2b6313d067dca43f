"""POST /v1/chat/completions: chats, their logprobs, reasoning and tool calls."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from serve.api.asks import (
    MOST_ENTRIES,
    Scoring,
    characters,
    check_fields,
    check_size,
    check_text,
    eos_ids,
    make_ask,
    stop_ids,
    stop_strings,
)
from serve.api.chat import Prepared, prepare, reply_parser
from serve.api.choice import Choice, Ending, Run, Updates, share_prompts
from serve.api.detokenize import Cutter, Detokenizer
from serve.api.entries import Names, chat_entry, prompt_entries
from serve.api.events import Delta, Kind, Parser, Span, ToolCall, apart
from serve.api.replies import ChatChunk, ChatReply
from serve.api.sending import EventStream, streamed
from serve.api.usage import Usage
from serve.engine.runtime import ModelRuntime
from serve.engine.sequence import RowScores
from serve.errors import BadRequest
from serve.state import ServerState
from serve.wire import ChatRequest


def router(state: ServerState) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=ChatReply, responses=streamed(ChatChunk))
    async def chat(body: ChatRequest, request: Request) -> Response:
        """A reply to a chat, whole or (with `stream`) as server-sent events.

        `logprobs.content` has the entries of the visible text, `logprobs.reasoning_content` and
        `logprobs.tool_calls` those of what is not content; together they cover every sampled token.
        """
        model = state.engine.model(body.model)
        _check(model, body)
        prepared = await run_in_threadpool(_prepare, state, model, body)
        check_size(model, "prompt_logprobs", len(prepared.encoded.ids), body.prompt_logprobs)
        if not body.stream:
            check_size(model, "top_logprobs", body.n * _room(model, body, len(prepared.encoded.ids)), _k(body))
        reply = _Reply(state, model, body, prepared)
        run = Run(state.engine, model)
        try:
            run.start(share_prompts([_choice(reply, run, index) for index in range(body.n)], body.n))
        except BadRequest as error:
            error.param = "messages" if error.param == "prompt" else error.param  # here the messages are the prompt
            raise
        state.metrics.count_prompts(model.name, len(prepared.encoded.ids))
        if body.stream:
            return EventStream(_stream(state, reply, run))
        async for index, updates in run.updates(request):
            reply.gather(index, updates)
        reply.count(state)
        return state.json(await run_in_threadpool(reply.whole))

    return routes


def _check(model: ModelRuntime, body: ChatRequest) -> None:
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("'top_logprobs' needs logprobs: true", param="top_logprobs")
    ks = {"top_logprobs": _k(body), "prompt_logprobs": body.prompt_logprobs}
    check_fields(model, body, ks)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise BadRequest("'max_tokens' and 'max_completion_tokens' differ: give one", param="max_completion_tokens")


def _k(body: ChatRequest) -> int | None:
    """Alternatives asked for: None = no logprobs."""
    return (body.top_logprobs or 0) if body.logprobs else None


def _prepare(state: ServerState, model: ModelRuntime, body: ChatRequest) -> Prepared:
    check_text(model, characters(body.messages), "messages")
    return prepare(
        model,
        state.config,
        body.messages,
        template=body.chat_template,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        tools=None if body.tool_choice == "none" else body.tools,
        template_kwargs=body.chat_template_kwargs,
    )


def _room(model: ModelRuntime, body: ChatRequest, prompt: int) -> int:
    """Tokens to generate: as asked, or what the context and the KV memory leave (at least 1)."""
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if asked is not None:
        return asked
    room = min(model.context_length, model.pool.capacity) if model.runner.keeps_kv else model.context_length
    k = _k(body)
    if k is not None and not body.stream:  # no more than one reply may list
        each = model.head.vocab_size if k == -1 else k + 1
        return max(1, min(room - prompt, MOST_ENTRIES // each // body.n))
    return max(1, room - prompt)


def _choice(reply: _Reply, run: Run, index: int) -> Choice:
    model, body = reply.model, reply.body
    ids = reply.prepared.encoded.ids
    ask = make_ask(
        model,
        body,
        ids,
        max_tokens=_room(model, body, len(ids)),
        scoring=Scoring(_k(body), body.prompt_logprobs),
        choice=index,
    )
    detokenizer = Detokenizer(
        model.loaded.tokenizer,
        hide=stop_ids(model, body),
        hide_special=body.skip_special_tokens,
        keep=reply.parts[index].parser.marks,
    )
    cutter = Cutter(
        detokenizer, stop=stop_strings(body), min_tokens=body.min_tokens, include=body.include_stop_str_in_output
    )
    return Choice(ask, cutter, run.deliverer(index), eos=eos_ids(model), live=body.stream)


@dataclass
class _Part:
    """One choice: its parser, and the deltas that are not sent yet (all of them, where nothing streams)."""

    parser: Parser
    deltas: list[Delta] = field(default_factory=list)
    prompt_rows: list[RowScores] | None = None
    end: Ending | None = None
    calls: int = 0
    begun: bool = False

    def add(self, updates: Updates) -> Iterator[Delta]:
        for update in updates:
            if update.prompt is not None:
                self.prompt_rows = update.prompt
            if update.span is not None:
                yield from self.parser.feed(update.span)
            if update.end is not None:
                yield from self.parser.end()
                self.end = update.end

    @property
    def finish_reason(self) -> str | None:
        if self.end is None:
            return None
        return "tool_calls" if self.calls and self.end.reason == "stop" else self.end.reason


class _Reply:
    """Writes one chat's choices, whole or in chunks, from the same deltas."""

    def __init__(self, state: ServerState, model: ModelRuntime, body: ChatRequest, prepared: Prepared) -> None:
        self.model, self.body, self.prepared = model, body, prepared
        tools = bool(body.tools) and body.tool_choice != "none"
        self.parts = [_Part(reply_parser(model, state.config, prepared, tools=tools)) for _ in range(body.n)]
        self._names = Names(model.loaded.tokenizer, as_ids=body.return_tokens_as_token_ids)
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model.name}
        self.usage = Usage(prompt=len(prepared.encoded.ids))

    def gather(self, index: int, updates: Updates) -> list[Delta]:
        """Take in a choice's updates; returns what is new."""
        part = self.parts[index]
        fresh = [delta for delta in part.add(updates) if not delta.empty]
        part.deltas += fresh
        part.calls += sum(delta.call is not None for delta in fresh)
        self.usage.completion += sum(len(delta.tokens) for delta in fresh)
        if part.end is not None and index == 0:
            self.usage.cached = part.end.cached_tokens
        return fresh

    def count(self, state: ServerState) -> None:
        """Tell the metrics."""
        state.metrics.count_generated(self.model.name, self.usage.completion, cached=self.usage.cached)

    def whole(self) -> dict[str, Any]:
        """The reply."""
        body = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._write(index) for index in range(len(self.parts))],
            "usage": self.usage.body(),
        }
        if self.body.prompt_logprobs is not None:
            body["prompt_logprobs"] = self._prompt(self.parts[0])
        if self.body.return_token_ids:
            body["prompt_token_ids"] = list(self.prepared.encoded.ids)
        return body

    def chunks(self, index: int, updates: Updates) -> Iterator[dict[str, Any]]:
        """The chunks of a choice's updates: the role first, a chunk per delta, the reason last."""
        part = self.parts[index]
        sent_calls = part.calls
        deltas = self.gather(index, updates)
        if not part.begun:
            part.begun = True
            yield self._chunk(index, {"role": "assistant", "content": ""}, opening=part)
        for delta in deltas:
            for piece in _apart(delta):
                yield self._chunk(index, self._delta(piece, sent_calls), tokens=piece)
            sent_calls += delta.call is not None
        part.deltas.clear()
        if part.end is not None:
            yield self._chunk(index, {}, closing=part)

    def last_chunk(self) -> dict[str, Any]:
        """The chunk with the usage."""
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self.usage.body()}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        opening: _Part | None = None,
        tokens: Delta | None = None,
        closing: _Part | None = None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": None if tokens is None else self._logprobs([tokens]),
            "finish_reason": None if closing is None else closing.finish_reason,
        }
        if closing is not None and closing.end is not None:
            choice["stop_reason"] = closing.end.stop_reason
        if tokens is not None and self.body.return_token_ids:
            choice["token_ids"] = [token.token for token in tokens.tokens]
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        if opening is not None and self.body.prompt_logprobs is not None:
            chunk["prompt_logprobs"] = self._prompt(opening)
        if opening is not None and self.body.return_token_ids:
            chunk["prompt_token_ids"] = list(self.prepared.encoded.ids)
        options = self.body.stream_options
        if options is not None and options.continuous_usage_stats:
            chunk["usage"] = self.usage.body()
        elif options is not None and options.include_usage:
            chunk["usage"] = None
        return chunk

    def _prompt(self, part: _Part) -> list[dict[str, Any] | None]:
        return prompt_entries(self._names, part.prompt_rows or (), self.body.prompt_logprobs or 0)

    def _write(self, index: int) -> dict[str, Any]:
        part = self.parts[index]
        text = {kind: "".join(d.text for d in part.deltas if d.kind is kind) for kind in Kind}
        calls = [delta.call for delta in part.deltas if delta.call is not None]
        message: dict[str, Any] = {"role": "assistant", "content": text[Kind.CONTENT]}
        if calls:
            message["content"] = text[Kind.CONTENT] or None
            message["tool_calls"] = [_call(call) for call in calls]
        if any(delta.kind is Kind.REASONING for delta in part.deltas):
            message["reasoning_content"] = text[Kind.REASONING]
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(part.deltas),
            "finish_reason": part.finish_reason,
            "stop_reason": None if part.end is None else part.end.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = [token.token for delta in part.deltas for token in delta.tokens]
        return choice

    def _logprobs(self, deltas: list[Delta]) -> dict[str, Any] | None:
        """Entries by what their tokens are part of; `content` is always there."""
        k = _k(self.body)
        if k is None:
            return None
        lists: dict[str, list[dict[str, Any]]] = {Kind.CONTENT.value: []}
        for delta in deltas:
            entries = [chat_entry(self._names, t.row, k) for t in delta.tokens if t.row is not None]
            if entries:
                lists.setdefault(delta.kind.value, []).extend(entries)
        return lists

    @staticmethod
    def _delta(delta: Delta, index: int) -> dict[str, Any]:
        if delta.kind is not Kind.TOOL:
            return {delta.kind.value: delta.text}
        return {} if delta.call is None else {"tool_calls": [{"index": index, **_call(delta.call)}]}


def _apart(delta: Delta) -> Iterator[Delta]:
    """The delta in pieces, every silent token in one of its own; a call goes with the last."""
    *firsts, last = [*apart(Span(delta.text, delta.tokens))] or [Span("")]
    for span in firsts:
        yield Delta(delta.kind, span.text, span.tokens)
    yield Delta(delta.kind, last.text, last.tokens, delta.call)


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


async def _stream(state: ServerState, reply: _Reply, run: Run) -> AsyncIterator[dict[str, Any]]:
    async for index, updates in run.updates():
        for chunk in reply.chunks(index, updates):
            yield chunk
    reply.count(state)
    options = reply.body.stream_options
    if options is not None and options.include_usage:
        yield reply.last_chunk()
