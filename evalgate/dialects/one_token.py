"""What a continuation asks of /v1/completions, and what is read from a second reply about the same position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from evalgate.dialects import listings
from evalgate.dialects.base import Ask, Asking, Place, PositionScore, Score
from evalgate.dialects.findings import Findings, complete
from evalgate.dialects.generated import Generated
from evalgate.dialects.listings import Listing
from evalgate.dialects.rows import is_sentinel, tail_without

PATH = "/v1/completions"


def fields(ask: Ask, prompt: list[Any], *, prompt_ids: bool = True) -> dict[str, Any]:
    """The body of a request for one generated token; `prompt` is a list of ids or a list of such lists.

    prompt_ids False: the prompt does not come back where the alternatives carry ids anyway.
    """
    able = ask.capabilities
    found: dict[str, Any] = {
        "model": ask.model,
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": able.temperature,
        "logprobs": ask.k,
    }
    if able.token_id_keys:
        found["return_tokens_as_token_ids"] = True
    if able.return_token_ids and (prompt_ids or not able.token_id_keys):
        found["return_token_ids"] = True
    return found


def generated_listing(found: Findings, k: int) -> Asking[Listing]:
    """The alternatives of the token generated after the probe's prompt, keyed by id where that can be had."""
    flags = {"return_tokens_as_token_ids": True} if found.facts["token_id_keys"] else {}
    return listings.of_choice(next(iter((yield from complete(found, logprobs=k, **flags))), None))


def named(generated: Generated) -> dict[int, float]:
    """id -> logprob of every entry whose id is certain and whose value is a number."""
    certain = (e for e in generated.entries if len(e.ids) == 1 and not is_sentinel(e.logprob))
    return {next(iter(e.ids)): e.logprob for e in certain}


def completed(row: PositionScore, known: Mapping[int, float], place: Place) -> PositionScore:
    """The row with wanted ids filled in from a second reply and their mass taken out of the tail.

    An id that did not come stays censored. Raises ScoreError where the masses add up to more than 1.
    """
    wanted = tuple(s if s.known or s.token not in known else _known(s.token, known[s.token]) for s in row.wanted)
    new = {now.token: now.low for now, before in zip(wanted, row.wanted, strict=True) if now.known and not before.known}
    return replace(row, wanted=wanted, tail=tail_without(row.tail, new.values(), place))


def _known(token: int, logprob: float) -> Score:
    return Score(token, logprob, logprob)
