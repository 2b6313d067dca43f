"""POST /tokenize: text or chat to token ids, special tokens in text read as plain text."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool

from serve.engine.runtime import ModelRuntime
from serve.errors import BadRequest
from serve.models.tokenizer import bos_id, encode_chat, encode_text
from serve.routes.state import ServerState
from serve.wire import TokenizeReply, TokenizeRequest


def router(state: ServerState) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/tokenize", response_model_exclude_none=True)
    async def tokenize(body: TokenizeRequest) -> TokenizeReply:
        """Token ids of a prompt, several prompts, or a chat."""
        model = state.engine.model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("give either 'prompt' or 'messages'", param="prompt")
        if body.messages is not None:
            return await run_in_threadpool(_chat, model, body)
        return await run_in_threadpool(_text, model, body)

    return routes


def _text(model: ModelRuntime, body: TokenizeRequest) -> TokenizeReply:
    texts = [body.prompt] if isinstance(body.prompt, str) else list(body.prompt or ())
    tokenizer = model.loaded.tokenizer
    bos = bos_id(tokenizer)
    prefix = [bos] if bos is not None and body.add_special_tokens else []
    encoded = [encode_text(tokenizer, text) for text in texts]
    tokens = [prefix + list(e.ids) for e in encoded]
    sizes = [[0] * len(prefix) + list(e.bytes_per_token) for e in encoded] if body.return_details else None
    single = isinstance(body.prompt, str)
    return TokenizeReply(
        count=len(tokens[0]) if single else [len(t) for t in tokens],
        tokens=tokens[0] if single else tokens,
        max_model_len=model.context_length,
        bytes=None if sizes is None else (sizes[0] if single else sizes),
        bos_token_id=bos if body.return_details else None,
    )


def _chat(model: ModelRuntime, body: TokenizeRequest) -> TokenizeReply:
    encoded = encode_chat(model.loaded.tokenizer, body.messages or [], template=body.chat_template)
    details = body.return_details
    return TokenizeReply(
        count=len(encoded.ids),
        tokens=list(encoded.ids),
        max_model_len=model.context_length,
        bytes=list(encoded.bytes_per_token) if details else None,
        assistant=list(encoded.assistant_mask) if details else None,
        bos_token_id=bos_id(model.loaded.tokenizer) if details else None,
    )
