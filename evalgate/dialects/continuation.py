"""One generated token per position over /v1/completions: any server that returns its logprob.

The prefix goes out as token ids and the alternatives of the one generated token are read. Where the server
can force the token (`allowed_token_ids`, `logit_bias`) and keeps its logprob raw, every position has a
number; elsewhere an actual token outside the k best is censored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from evalgate.core import Window
from evalgate.dialects.base import Ask, Dialect, Exchange, Place, PositionScore, Reply, Request, Score
from evalgate.dialects.body import check_prompt, only_choice, read_body
from evalgate.dialects.generated import Generated, read_generated
from evalgate.dialects.rows import is_sentinel, score_position, tail_without
from evalgate.dialects.stepwise import Step, check_forced, stepwise

PATH = "/v1/completions"


def score_window(window: Window, ask: Ask) -> Exchange:
    """Score a window, one request per position and one more where wanted ids are not listed."""
    able = ask.capabilities
    place = Place(PATH, window.index)

    def body(position: int) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "model": ask.model,
            "prompt": list(window.ids[:position]),
            "max_tokens": 1,
            "temperature": able.temperature,
            "logprobs": ask.k,
        }
        if able.token_id_keys:
            fields["return_tokens_as_token_ids"] = True
        if able.return_token_ids:
            fields["return_token_ids"] = True
        return fields

    def request(position: int) -> Request:
        return Request("POST", PATH, body(position) | forcing(window.ids[position], able.forced))

    def answer(position: int, reply: Reply) -> Generated:
        here = place.at(position)
        parsed = read_body(reply, here, k=ask.k)
        choice = only_choice(parsed, here)
        check_prompt(parsed, choice, window.ids[:position], here)
        return read_generated(choice, ask, here)

    def read(position: int, reply: Reply) -> Step:
        here, token = place.at(position), window.ids[position]
        entries, text_keyed = answer(position, reply)
        if able.forced:
            entries[0] = check_forced(entries[0], token, able.forced, here)
        return Step(score_position(token, entries, ask, here, text_keyed=text_keyed), text_keyed)

    def more(row: PositionScore) -> Request | None:
        missing = sorted({score.token for score in row.wanted if not score.known})
        if not missing or row.unmatched or not able.logprob_token_ids:
            return None
        return Request("POST", PATH, body(row.position) | {"logprob_token_ids": missing})

    def read_more(row: PositionScore, reply: Reply) -> PositionScore:
        return completed(row, named(answer(row.position, reply)), place.at(row.position))

    return stepwise(window, ask, request=request, read=read, more=more, read_more=read_more)


def forcing(token: int, field: str) -> dict[str, Any]:
    """The request field that makes `token` the generated one."""
    if field == "allowed_token_ids":
        return {"allowed_token_ids": [token]}
    return {"logit_bias": {str(token): 100.0}} if field == "logit_bias" else {}


def named(generated: Generated) -> dict[int, float]:
    """id -> logprob of every entry whose id is certain and whose value is a number."""
    return {next(iter(e.ids)): e.logprob for e in _certain(generated)}


def _certain(generated: Generated) -> Iterable[Any]:
    return (e for e in generated.entries if len(e.ids) == 1 and not is_sentinel(e.logprob))


def completed(row: PositionScore, known: dict[int, float], place: Place) -> PositionScore:
    """The row with wanted ids filled in from a second reply and their mass taken out of the tail.

    An id that did not come stays censored. Raises ScoreError where the masses add up to more than 1.
    """
    wanted = tuple(s if s.known or s.token not in known else _known(s.token, known[s.token]) for s in row.wanted)
    new = {now.token: now.low for now, before in zip(wanted, row.wanted, strict=True) if now.known and not before.known}
    return replace(row, wanted=wanted, tail=tail_without(row.tail, new.values(), place))


def _known(token: int, logprob: float) -> Score:
    return Score(token, logprob, logprob)


DIALECT = Dialect(
    summary="one generated token per position over /v1/completions; forced where the server can",
    prompt_scoring=False,
    score_window=score_window,
)
