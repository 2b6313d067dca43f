"""From a request's fields to what the engine is asked: every refusal happens here, before any compute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from serve.engine.loop import check_k
from serve.engine.runtime import HeadRuntime, ModelRuntime
from serve.engine.sequence import Ask
from serve.errors import BadRequest
from serve.models.tokenizer import longest_token
from serve.wire import Generation

MAX_CHOICES = 4096  # of one request
MOST_ENTRIES = 1 << 19  # tokens listed with a logprob in one reply: about half a GiB while it is written


class Scoring(NamedTuple):
    """What is to be scored: k of generated tokens and of the prompt (None = nothing), as the engine needs it."""

    generated: int | None
    prompt: int | None


def eos_ids(model: ModelRuntime) -> frozenset[int]:
    """The ids that end a generation."""
    eos: Any = getattr(model.loaded.model.generation_config, "eos_token_id", None)
    eos = model.loaded.tokenizer.eos_token_id if eos is None else eos
    return frozenset(() if eos is None else (eos,) if isinstance(eos, int) else eos)


def widest(a: int | None, b: int | None) -> int | None:
    """The k that serves both (-1 = the whole vocabulary is the widest)."""
    given = [k for k in (a, b) if k is not None]
    return None if not given else -1 if -1 in given else max(given)


def check_fields(model: ModelRuntime, body: Generation, ks: dict[str, int | None]) -> None:
    """Raise BadRequest, naming the field, for what the types of the wire cannot tell. ks: k by field name."""
    for name, k in ks.items():
        check_k(name, k, model.config.max_logprobs, model.head.vocab_size)
    if body.stream_options is not None and not body.stream:
        raise BadRequest("'stream_options' needs stream: true", param="stream_options")
    if body.logprob_token_ids and all(k is None for k in ks.values()):
        raise BadRequest("'logprob_token_ids' needs logprobs or prompt_logprobs", param="logprob_token_ids")
    vocabulary = model.head.vocab_size
    _check_ids("stop_token_ids", body.stop_token_ids or (), vocabulary)
    _check_ids("allowed_token_ids", body.allowed_token_ids or (), vocabulary)
    _check_ids("logit_bias", map(int, body.logit_bias or ()), vocabulary)
    if body.min_tokens and not _can_start(model, body):
        raise BadRequest("'min_tokens' leaves no token to choose: every allowed one ends the text", param="min_tokens")


def check_size(model: ModelRuntime, field: str, rows: int, k: int | None) -> None:
    """Raise BadRequest where `rows` positions with k alternatives each are more than one reply may list."""
    if k is None:
        return
    each = model.head.vocab_size if k == -1 else k + 1
    if rows * each > MOST_ENTRIES:
        raise BadRequest(
            f"'{field}' for {rows} positions lists {rows * each:,} tokens and one reply may list {MOST_ENTRIES:,}: ask "
            "for fewer prompts or a smaller k",
            param=field,
        )


def characters(value: Any) -> int:
    """Characters of all texts in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(characters, value.values()))
    return sum(map(characters, value)) if isinstance(value, list) else 0


def check_text(model: HeadRuntime, characters: int, field: str, *, more: str = "") -> None:
    """Raise BadRequest for a text that must be too long, before time is spent on its tokens. more: what to do."""
    most = model.context_length * longest_token(model.loaded.tokenizer)
    if characters > most:
        raise BadRequest(
            f"'{field}' has {characters:,} characters, more than fit the context of {model.name} "
            f"({model.context_length:,} tokens){more}",
            param=field,
        )


def make_ask(
    model: ModelRuntime, body: Generation, prompt: tuple[int, ...], *, max_tokens: int, scoring: Scoring, choice: int
) -> Ask:
    """The ask of one choice; with a seed, choice i is what a request with n = 1 and seed + i would get."""
    if body.min_tokens > max_tokens:
        raise BadRequest(f"'min_tokens' is more than the {max_tokens} tokens asked for", param="min_tokens")
    wanted, wanted_at = _wanted(model, body, len(prompt), max_tokens=max_tokens, scoring=scoring)
    return Ask(
        prompt=prompt,
        max_tokens=max_tokens,
        logprobs=scoring.generated,
        prompt_logprobs=scoring.prompt,
        temperature=body.temperature,
        seed=None if body.seed is None else body.seed + choice,
        stop_token_ids=stop_ids(model, body),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        top_p=body.top_p,
        top_k=max(0, body.top_k),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=tuple({int(token): bias for token, bias in (body.logit_bias or {}).items()}.items()),
        min_tokens=body.min_tokens,
        wanted=wanted,
        wanted_at=wanted_at,
    )


def stop_ids(model: ModelRuntime, body: Generation) -> frozenset[int]:
    """Ids that end this request's text and do not show in it."""
    return frozenset(body.stop_token_ids or ()) | (frozenset() if body.ignore_eos else eos_ids(model))


def stop_strings(body: Generation) -> tuple[str, ...]:
    """Strings that end this request's text."""
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def _can_start(model: ModelRuntime, body: Generation) -> bool:
    stops = {token for token in stop_ids(model, body) if token < model.head.vocab_size}
    if body.allowed_token_ids:
        return bool(set(body.allowed_token_ids) - stops)
    return len(stops) < model.head.vocab_size


def _wanted(
    model: ModelRuntime, body: Generation, prompt: int, *, max_tokens: int, scoring: Scoring
) -> tuple[tuple[int, ...], dict[int, tuple[int, ...]] | None]:
    """(ids for all positions, ids by position of prompt + generated or None)."""
    given = body.logprob_token_ids or []
    lists = [row for row in given if isinstance(row, list)]
    flat = [token for token in given if isinstance(token, int)]
    _check_ids("logprob_token_ids", [*flat, *(token for row in lists for token in row)], model.head.vocab_size)
    if not lists:
        return tuple(flat), None
    before = prompt if scoring.prompt is not None else 0
    after = max_tokens if scoring.generated is not None else 0
    if len(lists) != before + after:
        raise BadRequest(
            f"'logprob_token_ids' has {len(lists)} lists for {before} prompt tokens and {after} new ones",
            param="logprob_token_ids",
        )
    return (), {prompt - before + i: tuple(row) for i, row in enumerate(lists)}


def _check_ids(name: str, ids: Iterable[int], vocabulary: int) -> None:
    wrong = next((token for token in ids if token >= vocabulary), None)
    if wrong is not None:
        raise BadRequest(f"'{name}': token id {wrong} is outside the vocabulary (0..{vocabulary - 1})", param=name)
