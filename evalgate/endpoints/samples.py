"""Tokens drawn from a source at temperature 1 with nothing cut off: samples of its own distribution."""

from __future__ import annotations

from typing import Any

from evalgate.dialects.base import Place, Request
from evalgate.dialects.body import only_choice, read_body
from evalgate.endpoints.channel import Channel
from evalgate.endpoints.source import EndpointSource

_COMPLETIONS = "/v1/completions"
_NATIVE = "/completion"


def draw(
    source: EndpointSource, channel: Channel, prompt: tuple[int, ...], count: int, *, seed: int
) -> tuple[int, ...] | None:
    """Up to `count` new token ids after the prompt; fewer where the text ended, None where no ids come back.

    Raises EndpointError for a refusal. That the server samples without truncation is asked for, not proved.
    """
    if source.dialect == "llamacpp":
        return _native(channel, prompt, count, seed)
    if source.dialect in ("chat", "sglang"):
        return None
    able = source.capabilities
    fields: dict[str, Any] = {
        "model": source.model,
        "prompt": list(prompt),
        "max_tokens": count,
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": seed,
    }
    if able.return_token_ids:
        fields["return_token_ids"] = True
    elif able.token_id_keys:
        fields |= {"return_tokens_as_token_ids": True, "logprobs": 1}
    else:
        return None
    place = Place(_COMPLETIONS)
    choice = only_choice(read_body(channel.send(Request("POST", _COMPLETIONS, fields)), place), place)
    if able.return_token_ids:
        return _ids(choice.get("token_ids"), prompt)
    named = (choice.get("logprobs") or {}).get("tokens")
    if not isinstance(named, list) or not all(str(t).startswith("token_id:") for t in named):
        return None
    return tuple(int(str(t).removeprefix("token_id:")) for t in named)


def _native(channel: Channel, prompt: tuple[int, ...], count: int, seed: int) -> tuple[int, ...] | None:
    fields: dict[str, Any] = {
        "prompt": list(prompt),
        "n_predict": count,
        "n_probs": 1,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": seed,
        "samplers": ["temperature"],
    }
    body = read_body(channel.send(Request("POST", _NATIVE, fields)), Place(_NATIVE))
    listed = body.get("completion_probabilities")
    return _ids([item.get("id") for item in listed], prompt) if isinstance(listed, list) else None


def _ids(found: object, prompt: tuple[int, ...]) -> tuple[int, ...] | None:
    """The new ids; a server that puts the prompt before them is cut to what is new."""
    if not isinstance(found, list) or not all(type(t) is int for t in found):
        return None
    ids = tuple(found)
    return ids[len(prompt) :] if len(ids) > len(prompt) and ids[: len(prompt)] == prompt else ids
