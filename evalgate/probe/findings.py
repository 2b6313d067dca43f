"""The probe's notebook: what is asked with, what was found so far, and how one question is put."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from evalgate.dialects.base import Place, Reply, Request, Vocabulary
from evalgate.dialects.body import prompt_tokens, read_body
from evalgate.errors import EndpointError
from evalgate.probe.listings import Listing

T = TypeVar("T")
Asking = Generator[tuple[Request, ...], tuple[Reply, ...], T]
Body = dict[str, Any] | None

COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class Question:
    """What the probe asks with.

    ids: at least 4 tokens of plain text, as the local tokenizer cuts `text` (BOS included where it adds
    one). local_ids: ids of `text` without special tokens. vocabulary: reads alternatives that come as text.
    dialect: the one that will be used whatever is found, "" = the best.
    """

    model: str
    ids: tuple[int, ...]
    text: str
    local_ids: tuple[int, ...] = ()
    vocabulary: Vocabulary | None = None
    dialect: str = ""


@dataclass
class Findings:
    """The certificate while it is being filled."""

    question: Question
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    listings: list[Listing] = field(default_factory=list)
    first: Listing = field(default_factory=list)  # the very first, cold, asked for without flags
    plain: Listing = field(default_factory=list)  # the same with ids where they can be had
    k_from: Literal["prompt_logprobs", "echo", "generated", "chat", ""] = ""


def ask(found: Findings, path: str, fields: dict[str, Any] | None, *, k: int = 0) -> Asking[Body]:
    """One question; None where the endpoint refuses it."""
    (reply,) = yield (Request("GET" if fields is None else "POST", path, fields),)
    return _read(found, path, reply, k)


def ask_all(found: Findings, questions: Sequence[tuple[str, dict[str, Any]]]) -> Asking[list[Body]]:
    """Several questions at once, None for each that is refused."""
    replies = yield tuple(Request("POST", path, fields) for path, fields in questions)
    return [_read(found, path, reply, 0) for (path, _), reply in zip(questions, replies, strict=True)]


def _read(found: Findings, path: str, reply: Reply, k: int) -> Body:
    try:
        return read_body(reply, Place(path), k=k)
    except EndpointError as error:
        if reply.status in (401, 403, 429, 502, 503, 504):
            raise
        found.notes.append(error.message)
        return None


def complete(found: Findings, **fields: Any) -> Asking[list[dict[str, Any]]]:
    """The choices of a completions request, by index; empty where it is refused."""
    base = {"model": found.question.model, "prompt": list(found.question.ids), "max_tokens": 1, "temperature": 0}
    body = yield from ask(
        found, COMPLETIONS, base | fields, k=int(fields.get("prompt_logprobs", fields.get("logprobs", 0)))
    )
    choices = [c for c in (body or {}).get("choices") or () if isinstance(c, dict)]
    if body is not None and choices:
        choices[0]["usage"] = prompt_tokens(body, Place(COMPLETIONS))
    return sorted(choices, key=lambda c: c.get("index", 0))
