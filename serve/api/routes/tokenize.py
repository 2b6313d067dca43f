"""Text or chat to token ids and back; special tokens in text are read as plain text."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool

from serve.api.asks import MAX_CHOICES, characters, check_text
from serve.api.chat import prepare
from serve.api.detokenize import Detokenizer, control_tokens
from serve.engine.runtime import HeadRuntime
from serve.errors import BadRequest
from serve.models.tokenizer import encode_text, prefix_ids, token_text
from serve.state import ServerState
from serve.wire import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest


def router(state: ServerState) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/tokenize", response_model_exclude_none=True)
    async def tokenize(body: TokenizeRequest) -> TokenizeReply:
        """Token ids of a prompt, several prompts, or a chat."""
        model = state.engine.side(body.model)
        if body.content is not None:
            if body.prompt not in (None, body.content):
                raise BadRequest("'prompt' and 'content' differ: give one of them", param="content")
            body = body.model_copy(update={"prompt": body.content})
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("give either 'prompt' or 'messages'", param="prompt")
        if body.messages is not None:
            return await run_in_threadpool(_chat, state, model, body)
        return await run_in_threadpool(_text, state, model, body)

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeReply:
        """The text of token ids."""
        model = state.engine.side(body.model)
        wrong = next((token for token in body.tokens if token >= model.head.vocab_size), None)
        if wrong is not None:
            raise BadRequest(f"'tokens': token id {wrong} is outside the vocabulary", param="tokens")
        detokenizer = Detokenizer(model.loaded.tokenizer, hide_special=body.skip_special_tokens)
        return DetokenizeReply(prompt="".join(map(detokenizer.text, body.tokens)) + detokenizer.rest())

    @routes.get("/tokenizer_info")
    async def tokenizer_info(model: str | None = None) -> dict[str, Any]:
        """What a client needs to know of the tokenizer, as its configuration file has it."""
        tokenizer = state.engine.side(model).loaded.tokenizer
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": len(tokenizer),
            "adds_bos": bool(prefix_ids(tokenizer)),
            "chat_template": tokenizer.chat_template,
            **{name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)},
        }

    return routes


def _check(state: ServerState, model: HeadRuntime, field: str, texts: list[Any]) -> None:
    """Refuse what completions and chats would refuse, unless the server was started for long texts."""
    if state.config.long_texts:
        return
    if len(texts) > MAX_CHOICES:
        raise BadRequest(f"{len(texts)} prompts are more than {MAX_CHOICES}", param=field)
    for text in texts:
        check_text(model, characters(text), field, more=": start the server with --long-texts")


def _text(state: ServerState, model: HeadRuntime, body: TokenizeRequest) -> TokenizeReply:
    texts = [body.prompt] if isinstance(body.prompt, str) else list(body.prompt or ())
    _check(state, model, "prompt", texts)
    tokenizer = model.loaded.tokenizer
    before = prefix_ids(tokenizer)
    prefix = list(before) if body.add_special_tokens else []
    if len(texts) == 1 and isinstance(body.prompt, str) and not body.return_details:
        control = _control(tokenizer, body.prompt)
        if control is not None:
            written = [body.prompt] if body.return_token_strs else None
            return TokenizeReply(count=1, tokens=[control], max_model_len=model.context_length, token_strs=written)
    encoded = [encode_text(tokenizer, text) for text in texts]
    tokens = [prefix + list(e.ids) for e in encoded]
    sizes = [[0] * len(prefix) + list(e.bytes_per_token) for e in encoded] if body.return_details else None
    single = isinstance(body.prompt, str)
    names = [[token_text(tokenizer, t) for t in row] for row in tokens] if body.return_token_strs else None
    return TokenizeReply(
        count=len(tokens[0]) if single else [len(t) for t in tokens],
        tokens=tokens[0] if single else tokens,
        max_model_len=model.context_length,
        bytes=None if sizes is None else (sizes[0] if single else sizes),
        **_first(before, details=body.return_details),
        token_strs=None if names is None else (names[0] if single else names),
    )


def _first(prefix: tuple[int, ...], *, details: bool) -> dict[str, Any]:
    """The reply's fields of what is put before a text."""
    if not details:
        return {}
    return {"prefix_token_ids": list(prefix), "bos_token_id": prefix[0] if len(prefix) == 1 else None}


def _control(tokenizer: Any, text: str) -> int | None:
    """The id of the control token whose text this is."""
    return next((token for token, control in control_tokens(tokenizer).items() if control == text), None)


def _chat(state: ServerState, model: HeadRuntime, body: TokenizeRequest) -> TokenizeReply:
    _check(state, model, "messages", [body.messages])
    encoded = prepare(
        model,
        state.config,
        body.messages or [],
        template=body.chat_template,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=body.tools,
    ).encoded
    details = body.return_details
    tokenizer = model.loaded.tokenizer
    return TokenizeReply(
        count=len(encoded.ids),
        tokens=list(encoded.ids),
        max_model_len=model.context_length,
        bytes=list(encoded.bytes_per_token) if details else None,
        assistant=list(encoded.assistant_mask) if details else None,
        **_first(prefix_ids(tokenizer), details=details),
        token_strs=[token_text(tokenizer, t) for t in encoded.ids] if body.return_token_strs else None,
    )
