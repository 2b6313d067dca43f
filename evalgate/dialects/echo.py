"""`echo: true` with `logprobs: k` on /v1/completions: the prompt's own tokens come back scored.

vLLM, SGLang, pegainfer and lm-evaluation-harness speak it. `logprobs.tokens` holds the n prompt tokens and,
unless `max_tokens` is 0, the generated one, which is left out. llama-server ignores `echo` without a word
and returns the generated token alone; that is refused.
"""

from __future__ import annotations

from typing import Any

from evalgate.core import Window, counted
from evalgate.dialects import listings
from evalgate.dialects.base import Ask, Asking, Dialect, Exchange, Place, PositionScore, Request
from evalgate.dialects.body import check_prompt, only_choice, prompt_tokens, read_body
from evalgate.dialects.findings import Findings, complete
from evalgate.dialects.generation import COMPLETIONS
from evalgate.dialects.listings import Listing
from evalgate.dialects.rows import Entry, as_logprob, score_position, window_scores
from evalgate.dialects.texts import check_text, entries_of_map
from evalgate.errors import EndpointError, ScoreError

PATH = "/v1/completions"
_IGNORED = "echo was ignored and no prompt token was scored: use the dialect 'llamacpp' or 'continuation'"


def _fields(window: Window, ask: Ask) -> dict[str, Any]:
    able = ask.capabilities
    fields: dict[str, Any] = {
        "model": ask.model,
        "prompt": list(window.ids),
        "max_tokens": 0 if able.max_tokens_zero else 1,
        "temperature": 0.0,
        "echo": True,
        "logprobs": ask.k,
    }
    if able.token_id_keys:
        fields["return_tokens_as_token_ids"] = True
    if able.return_token_ids:
        fields["return_token_ids"] = True
    return fields


def _lists(choice: dict[str, Any], place: Place) -> dict[str, list[Any]]:
    """tokens, token_logprobs and top_logprobs (filled with null where k = 0 leaves it out), equally long."""
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict) or isinstance(logprobs.get("content"), list):
        raise place.error(EndpointError, _IGNORED)
    lists = {name: logprobs.get(name) for name in ("tokens", "token_logprobs", "top_logprobs")}
    tokens = lists["tokens"]
    if not isinstance(tokens, list):
        raise place.error(EndpointError, _IGNORED)
    if lists["top_logprobs"] is None:
        lists["top_logprobs"] = [None] * len(tokens)
    whole: dict[str, list[Any]] = {}
    for name, values in lists.items():
        if not isinstance(values, list) or len(values) != len(tokens):
            raise place.error(ScoreError, f"logprobs.{name} is missing or not as long as logprobs.tokens")
        whole[name] = values
    return whole


def _check_count(
    lists: dict[str, list[Any]], body: dict[str, Any], choice: dict[str, Any], prompt: int, place: Place
) -> None:
    """n tokens or n and the generated one. n alone needs a reason: a cut prompt looks the same."""
    count = len(lists["tokens"])
    if count == 1 and prompt > 1:
        raise place.error(EndpointError, _IGNORED)
    if count not in (prompt, prompt + 1):
        raise place.error(
            ScoreError, f"{counted(count, 'token')} came back and the window has {prompt}: it was cut or added to"
        )
    explained = prompt_tokens(body, place) is not None or choice.get("prompt_token_ids") is not None
    if count == prompt and not explained and choice.get("finish_reason") != "stop":
        raise place.error(
            ScoreError, f"{counted(count, 'token')} came back where {prompt + 1} were due: the prompt was cut"
        )


def _row(window: Window, lists: dict[str, list[Any]], position: int, ask: Ask, place: Place) -> PositionScore:
    token, text = window.ids[position], lists["tokens"][position]
    own = Entry(frozenset({token}), as_logprob(lists["token_logprobs"][position], place), True, str(text))
    top = lists["top_logprobs"][position]
    listed = [] if not ask.k and not top else entries_of_map(top, ask, place)
    if ask.k and not listed:
        raise place.error(ScoreError, "the alternatives are missing (top_logprobs)")
    keyed = any(not str(key).startswith("token_id:") for key in top or ())
    return score_position(token, [own, *listed], ask, place, text_keyed=keyed)


def _echoed(choices: list[dict[str, Any]]) -> int:
    """Scored tokens of an echo reply; 0 where it has another shape."""
    logprobs = choices[0].get("logprobs") if choices else None
    tokens = logprobs.get("tokens") if isinstance(logprobs, dict) else None
    return len(tokens) if isinstance(tokens, list) else 0


class Echo(Dialect):
    """`echo` with `logprobs`; see the top of this file."""

    summary = "echo with logprobs on /v1/completions: one request per window"
    order = 40
    prompt_scoring = True
    generation = COMPLETIONS

    def score_window(self, window: Window, ask: Ask) -> Exchange:
        """Score a window with one request."""
        positions = ask.positions_in(window)
        place = Place(PATH, window.index)
        (reply,) = yield (Request("POST", PATH, _fields(window, ask)),)
        body = read_body(reply, place, k=ask.k)
        choice = only_choice(body, place)
        lists = _lists(choice, place)
        check_prompt(body, choice, window.ids, place)
        _check_count(lists, body, choice, len(window.ids), place)
        for i, token in enumerate(window.ids):
            check_text(lists["tokens"][i], token, ask, place.at(i))
        if lists["token_logprobs"][0] is not None:
            raise place.error(
                ScoreError, "the first token has a logprob, which nothing predicts: positions are off by one"
            )
        rows = [_row(window, lists, i, ask, place.at(i)) for i in positions]
        keyed = any(not str(key).startswith("token_id:") for top in lists["top_logprobs"] if top for key in top)
        return window_scores(window, ask, rows, text_keyed=keyed)

    def recognised(self, found: Findings) -> Asking[bool]:
        """Every prompt token comes back scored. Fills the facts echo and max_tokens_zero."""
        facts, count = found.facts, len(found.question.ids)
        if not facts["ids_accepted"]:
            return False
        choices = yield from complete(found, echo=True, logprobs=1)
        facts["echo"] = _echoed(choices) in (count, count + 1)
        if choices and not facts["echo"]:
            found.notes.append("echo is accepted and ignored: a scorer that trusts it gets chance-level results")
        if facts["echo"]:
            none = yield from complete(found, echo=True, logprobs=1, max_tokens=0)
            facts["max_tokens_zero"] = _echoed(none) == count
        return facts["echo"] and found.takes_ids

    def listing(self, found: Findings, k: int) -> Asking[Listing]:
        """The second token's alternatives: nothing predicts the first."""
        choices = yield from complete(found, echo=True, logprobs=k)
        tops = ((choices[0].get("logprobs") or {}).get("top_logprobs") if choices else None) or []
        return listings.of_text_map(tops[1]) if len(tops) > 1 else []


DIALECT = Echo()
