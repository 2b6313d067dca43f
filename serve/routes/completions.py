"""POST /v1/completions: prompt logprobs and continuations, in vLLM's extension of OpenAI's shape."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, cast

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool

from serve.engine.runtime import ModelRuntime
from serve.engine.sequence import Ask, Finished, RowScores
from serve.errors import BadRequest
from serve.models.tokenizer import bos_id, decode, encode_text, token_text
from serve.routes.state import Answer, ServerState
from serve.wire import CompletionRequest

CENSORED = -9999.0  # how -inf is written: JSON has no infinities


@dataclass
class _Gathered:
    """What the engine told about one prompt."""

    prompt: list[RowScores] | None = None
    tokens: list[int] = field(default_factory=list)
    scores: list[RowScores | None] = field(default_factory=list)


def router(state: ServerState) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> dict[str, Any]:
        """Scores of the prompt's tokens (`prompt_logprobs`), of generated ones (`logprobs`), or both."""
        model = state.engine.model(body.model)
        prompts = await run_in_threadpool(_prompts, model, body)
        stops = frozenset(_eos_ids(model))
        answers = [_run(state, model, body, prompt, stops, request) for prompt in prompts]
        done = await asyncio.gather(*answers)
        return await run_in_threadpool(_reply, model, body, prompts, done)

    return routes


def _eos_ids(model: ModelRuntime) -> list[int]:
    eos = getattr(model.loaded.model.generation_config, "eos_token_id", None)
    eos = model.loaded.tokenizer.eos_token_id if eos is None else eos
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def _prompts(model: ModelRuntime, body: CompletionRequest) -> list[tuple[int, ...]]:
    """Token ids of every prompt. Text gets BOS where the tokenizer adds one; ids are taken as they are."""
    given: list[Any] = [body.prompt] if isinstance(body.prompt, str) or _is_ids(body.prompt) else list(body.prompt)
    if not given:
        raise BadRequest("'prompt' is an empty list", param="prompt")
    bos = bos_id(model.loaded.tokenizer) if body.add_special_tokens else None
    prompts = []
    for prompt in given:
        if isinstance(prompt, str):
            ids = tuple(encode_text(model.loaded.tokenizer, prompt).ids)
            prompts.append(ids if bos is None else (bos, *ids))
        else:
            prompts.append(tuple(prompt))
    return prompts


def _is_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)


async def _run(
    state: ServerState,
    model: ModelRuntime,
    body: CompletionRequest,
    prompt: tuple[int, ...],
    stops: frozenset[int],
    request: Request,
) -> tuple[_Gathered, Finished]:
    gathered = _Gathered()
    answer = Answer()

    def on_prompt(rows: list[RowScores]) -> None:
        gathered.prompt = rows

    def on_token(token: int, scores: RowScores | None) -> None:
        gathered.tokens.append(token)
        gathered.scores.append(scores)

    ask = Ask(
        prompt=prompt,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        temperature=body.temperature,
        seed=body.seed,
        stop_token_ids=stops,
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
    )
    sequence = state.engine.submit(model, ask, on_prompt=on_prompt, on_token=on_token, on_end=answer.deliver)
    finished = await answer.wait(request, lambda: state.engine.cancel(model, sequence))
    return gathered, cast(Finished, finished)


def _reply(
    model: ModelRuntime,
    body: CompletionRequest,
    prompts: list[tuple[int, ...]],
    done: list[tuple[_Gathered, Finished]],
) -> dict[str, Any]:
    choices = [
        _choice(model, body, index, prompt, gathered, finished)
        for index, (prompt, (gathered, finished)) in enumerate(zip(prompts, done, strict=True))
    ]
    prompt_tokens = sum(len(prompt) for prompt in prompts)
    completion_tokens = sum(len(gathered.tokens) for gathered, _ in done)
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model.name,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(finished.cached_tokens for _, finished in done)},
        },
    }


def _choice(
    model: ModelRuntime,
    body: CompletionRequest,
    index: int,
    prompt: tuple[int, ...],
    gathered: _Gathered,
    finished: Finished,
) -> dict[str, Any]:
    tokenizer = model.loaded.tokenizer
    ended = finished.reason == "stop"
    visible = gathered.tokens[:-1] if ended else gathered.tokens
    choice: dict[str, Any] = {
        "index": index,
        "text": decode(tokenizer, visible),
        "finish_reason": finished.reason,
        "logprobs": None,
    }
    if body.logprobs is not None:
        start = len(decode(tokenizer, prompt))
        choice["logprobs"] = _legacy(model, body, gathered, start)
    if body.prompt_logprobs is not None:
        rows = gathered.prompt or []
        choice["prompt_logprobs"] = [None, *(_entry(model, row) for row in rows)]
    if body.return_token_ids:
        choice["prompt_token_ids"] = list(prompt)
        choice["token_ids"] = gathered.tokens
    return choice


def _entry(model: ModelRuntime, row: RowScores) -> dict[str, Any]:
    """One prompt position, vLLM's shape: the actual token first, then the top-k by rank."""

    def item(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(model.loaded.tokenizer, token)}

    entry = {str(row.token): item(row.token, row.logprob, row.rank)}
    for rank, (token, logprob) in enumerate(zip(row.top_ids, row.top_logprobs, strict=True), start=1):
        entry.setdefault(str(token), item(token, logprob, rank))
    return entry


def _legacy(model: ModelRuntime, body: CompletionRequest, gathered: _Gathered, start: int) -> dict[str, Any]:
    """OpenAI's completion logprobs. Keys of one dict that decode alike keep the likeliest."""

    def name(token: int) -> str:
        if body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return token_text(model.loaded.tokenizer, token)

    rows = [row for row in gathered.scores if row is not None]
    offsets, at = [], start
    for row in rows:
        offsets.append(at)
        at += len(token_text(model.loaded.tokenizer, row.token))
    tops = []
    for row in rows:
        top: dict[str, float] = {}
        for token, logprob in zip(row.top_ids, row.top_logprobs, strict=True):
            top.setdefault(name(token), finite(logprob))
        top.setdefault(name(row.token), finite(row.logprob))
        tops.append(top)
    return {
        "tokens": [name(row.token) for row in rows],
        "token_logprobs": [finite(row.logprob) for row in rows],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def finite(logprob: float) -> float:
    """-inf as the wire writes it."""
    return CENSORED if logprob == float("-inf") else logprob
