"""What an endpoint says about its model: its name, its context, and how it cuts text into tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from evalgate.core import Document, TokenizedDocument
from evalgate.dialects.base import Place, Request
from evalgate.dialects.body import read_body
from evalgate.endpoints.channel import Channel
from evalgate.errors import EndpointError, EvalgateError, ScoreError, UsageError


def model_of(channel: Channel, wanted: str) -> str:
    """The model's name on the wire: `wanted`, or the only one that the endpoint lists.

    Raises UsageError where there is a choice, EndpointError for a wrong key or a reply that is no list.
    """
    if wanted:
        return wanted
    data = _models(channel).get("data")
    listed = [str(m["id"]) for m in data if isinstance(m, dict) and m.get("id")] if isinstance(data, list) else []
    if len(listed) != 1:
        choice = f"one of {', '.join(listed)}" if listed else "the model's name"
        raise UsageError(f"{channel.url} does not say which model to ask: write {channel.url}/v1#MODEL with {choice}")
    return listed[0]


def _models(channel: Channel) -> dict[str, Any]:
    path = "/v1/models"
    reply = channel.send(Request("GET", path))
    try:
        return read_body(reply, Place(f"{channel.url}{path}"))
    except EvalgateError as error:
        if 300 <= reply.status < 400 or reply.status in (401, 403):
            raise
        raise EndpointError(
            f"{error.message}, or name the model yourself: {channel.url}/v1#MODEL", endpoint=channel.url
        ) from error


def context_of(channel: Channel) -> int | None:
    """Tokens of context that llama-server's /props names, None where there is none."""
    body = _json(channel, "GET", "/props", None) or {}
    settings = body.get("default_generation_settings")
    size = settings.get("n_ctx") if isinstance(settings, dict) else None
    return size if isinstance(size, int) and size > 0 else None


def tokens_of(channel: Channel, model: str, text: str, *, special: bool) -> tuple[int, ...] | None:
    """Token ids of a text through /tokenize (vLLM's or llama-server's shape), None where the endpoint has none."""
    for body in _questions(model, text, special):
        tokens = (_json(channel, "POST", "/tokenize", body) or {}).get("tokens")
        if isinstance(tokens, list) and tokens and all(type(t) is int for t in tokens):
            return tuple(tokens)
    return None


def tokenize(channel: Channel, model: str, documents: Sequence[Document]) -> list[TokenizedDocument]:
    """Documents under the endpoint's own tokenizer.

    A chat, whose template only a local tokenizer knows, is shown as its plain text if it has one.

    Raises EndpointError where the endpoint does not tell the bytes of each token (only llama-server and our own server
    do) and for a chat without a plain text.
    """
    done = []
    for document in documents:
        if document.messages and not document.text:
            raise EndpointError(f"{document.name} is a chat, whose template no endpoint tells: give --tokenizer SPEC")
        found = _own_details(channel, model, document) or _llama_details(channel, document)
        if found is None:
            raise EndpointError(
                f"{channel.url} does not tell the bytes of its tokens: give --tokenizer SPEC, a local copy of the "
                "model, whose tokenizer then cuts the text"
            )
        if sum(found.bytes_per_token) != len(document.text.encode()):
            raise ScoreError(f"the tokens of {document.name} do not cover its text: give --tokenizer SPEC")
        done.append(replace(found, plain="no endpoint tells its chat template") if document.messages else found)
    return done


def _own_details(channel: Channel, model: str, document: Document) -> TokenizedDocument | None:
    fields = {"model": model, "prompt": document.text, "add_special_tokens": False, "return_details": True}
    body = _json(channel, "POST", "/tokenize", fields) or {}
    ids, sizes = body.get("tokens"), body.get("bytes")
    if not isinstance(ids, list) or not isinstance(sizes, list) or len(ids) != len(sizes):
        return None
    bos = body.get("bos_token_id")
    prefix = body.get("prefix_token_ids") or ([] if bos is None else [bos])
    return TokenizedDocument(document.name, document.domain, tuple(ids), tuple(sizes), prefix=tuple(prefix))


def _llama_details(channel: Channel, document: Document) -> TokenizedDocument | None:
    fields = {"content": document.text, "add_special": False, "parse_special": False, "with_pieces": True}
    tokens = (_json(channel, "POST", "/tokenize", fields) or {}).get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(t, dict) and "piece" in t for t in tokens):
        return None
    ids = tuple(int(t["id"]) for t in tokens)
    sizes = [len(t["piece"].encode()) if isinstance(t["piece"], str) else len(t["piece"]) for t in tokens]
    if sizes and sum(sizes) == len(document.text.encode()) + 1:
        sizes[0] -= 1  # SentencePiece puts a space before the text
    return TokenizedDocument(document.name, document.domain, ids, tuple(sizes), prefix=_llama_prefix(channel))


def _llama_prefix(channel: Channel) -> tuple[int, ...]:
    """The ids that llama-server puts before a text."""
    bare = _json(channel, "POST", "/tokenize", {"content": "a", "add_special": False}) or {}
    whole = _json(channel, "POST", "/tokenize", {"content": "a", "add_special": True}) or {}
    ids, plain = whole.get("tokens") or [], bare.get("tokens") or []
    before = next((n for n in range(len(ids)) if ids[n : n + len(plain)] == plain), 0)
    return tuple(int(token) for token in ids[:before])


def _questions(model: str, text: str, special: bool) -> tuple[dict[str, Any], ...]:
    return (
        {"model": model, "prompt": text, "add_special_tokens": special},
        {"content": text, "add_special": special, "parse_special": False},
    )


def _json(channel: Channel, method: str, path: str, fields: dict[str, Any] | None) -> dict[str, Any] | None:
    """The JSON object of a good reply, None where the endpoint refuses; EndpointError for a wrong key."""
    reply = channel.send(Request("GET" if method == "GET" else "POST", path, fields))
    if reply.status in (401, 403):
        raise EndpointError(
            f"{channel.url}{path} refused the request ({reply.status}): check the API key", endpoint=channel.url
        )
    if reply.status != 200:
        return None
    try:
        body = orjson.loads(reply.body)
    except orjson.JSONDecodeError:
        return None
    return body if isinstance(body, dict) else None
