"""How a server generates tokens with their log-probabilities: what the probe measures, and what `verify` draws."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evalgate.dialects import listings
from evalgate.dialects.base import Asking, Capabilities, Place, Request
from evalgate.dialects.body import only_choice, read_body
from evalgate.dialects.listings import Listing

Step = tuple[tuple[str, float], Listing]  # a generated token's own (key, logprob), and its alternatives


class Generation:
    """/v1/completions, which most servers have. A dialect with a path of its own overrides what differs there.

    path: where requests go. lists: whether one request may hold a list of prompts. named_field: the request field
    that asks for the log-probabilities of given ids, "" = there is none.
    """

    path = "/v1/completions"
    lists = True
    named_field = "logprob_token_ids"

    def fields(
        self,
        model: str,
        prompt: list[Any],
        *,
        count: int = 1,
        k: int = 5,
        temperature: float = 0.0,
        id_keys: bool = False,
    ) -> dict[str, Any]:
        """The body of a request for `count` tokens with k alternatives each.

        id_keys: ask for alternatives keyed by id. A temperature above 0 is seeded.
        """
        fields: dict[str, Any] = {
            "model": model,
            "prompt": prompt,
            "max_tokens": count,
            "temperature": temperature,
            "logprobs": k,
        }
        if temperature:
            fields["seed"] = 1
        return fields | ({"return_tokens_as_token_ids": True} if id_keys else {})

    def steps(self, body: dict[str, Any] | None) -> list[Step]:
        """Of each generated token its own (key, logprob) and its alternatives; empty where there are none."""
        choices = [c for c in (body or {}).get("choices") or () if isinstance(c, dict)]
        return listings.steps_of(choices[0] if choices else None)

    def forcings(self, token: int) -> Mapping[str, dict[str, Any]]:
        """Ways to force a token, by the request field's name, the preferred one first."""
        return {name: forcing(token, name) for name in ("allowed_token_ids", "logit_bias")}

    def draw(
        self, model: str, able: Capabilities, prompt: tuple[int, ...], count: int, *, seed: int
    ) -> Asking[tuple[int, ...] | None]:
        """Up to `count` ids sampled after the prompt (see `Dialect.draw`)."""
        fields: dict[str, Any] = {
            "model": model,
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
        place = Place(self.path)
        (reply,) = yield (Request("POST", self.path, fields),)
        choice = only_choice(read_body(reply, place), place)
        if able.return_token_ids:
            return new_ids(choice.get("token_ids"), prompt)
        named = (choice.get("logprobs") or {}).get("tokens")
        if not isinstance(named, list) or not all(str(t).startswith("token_id:") for t in named):
            return None
        return tuple(int(str(t).removeprefix("token_id:")) for t in named)


COMPLETIONS = Generation()


def forcing(token: int, field: str) -> dict[str, Any]:
    """The field of /v1/completions that makes `token` the generated one; empty where `field` is not such a field."""
    if field == "allowed_token_ids":
        return {"allowed_token_ids": [token]}
    return {"logit_bias": {str(token): 100.0}} if field == "logit_bias" else {}


def new_ids(found: object, prompt: tuple[int, ...]) -> tuple[int, ...] | None:
    """The new ids of a reply, without the prompt that some servers put before them; None where they are not ids."""
    if not isinstance(found, list) or not all(type(t) is int for t in found):
        return None
    ids = tuple(found)
    return ids[len(prompt) :] if len(ids) > len(prompt) and ids[: len(prompt)] == prompt else ids
