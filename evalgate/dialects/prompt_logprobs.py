"""vLLM's `prompt_logprobs: k` on /v1/completions: one request scores a whole window. pegainfer speaks it too.

`choices[0].prompt_logprobs` = null for t[0], then per token `{"<id>": {logprob, rank, decoded_token}}` with
the actual token and the k best: k+1 entries, or k where the actual token is among them. Our own server takes
`logprob_token_ids` besides, with a list for each position.
"""

from __future__ import annotations

from typing import Any

from evalgate.core import Window, counted
from evalgate.dialects.base import Ask, Asking, Capabilities, Dialect, Exchange, Place, PositionScore, Request
from evalgate.dialects.body import check_prompt, only_choice, read_body
from evalgate.dialects.findings import Findings
from evalgate.dialects.generation import COMPLETIONS
from evalgate.dialects.idmaps import last_row, prompt_maps, read_map, rows_come
from evalgate.dialects.listings import Listing
from evalgate.dialects.rows import score_position, window_scores
from evalgate.errors import ScoreError

PATH = "/v1/completions"


def _row(window: Window, maps: list[Any], position: int, ask: Ask, place: Place) -> PositionScore:
    token = window.ids[position]
    entries, rank, listed = read_map(maps[position], token, place)
    if not listed:
        raise place.error(
            ScoreError, f"the actual token {token} is not listed: the prompt is shifted, cut or was tokenized again"
        )
    return score_position(token, entries, ask, place, server_rank=rank)


class PromptLogprobs(Dialect):
    """vLLM's `prompt_logprobs`; see the top of this file."""

    summary = "prompt_logprobs on /v1/completions (vLLM, pegainfer, evalgate's own server): one request per window"
    order = 20
    prompt_scoring = True
    generation = COMPLETIONS

    def score_window(self, window: Window, ask: Ask) -> Exchange:
        """Score a window with one request."""
        positions = ask.positions_in(window)
        place = Place(PATH, window.index)
        fields: dict[str, Any] = {
            "model": ask.model,
            "prompt": list(window.ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": ask.k,
        }
        if ask.capabilities.return_token_ids:
            fields["return_token_ids"] = True
        if ask.wanted and ask.capabilities.logprob_token_ids:  # a list per prompt token
            fields["logprob_token_ids"] = [list(ask.wanted.get(i, ())) for i in range(len(window.ids))]
        (reply,) = yield (Request("POST", PATH, fields),)
        body = read_body(reply, place, k=ask.k)
        choice = only_choice(body, place)
        check_prompt(body, choice, window.ids, place)
        maps = prompt_maps(body, choice, place)
        if len(maps) != len(window.ids):
            raise place.error(
                ScoreError,
                f"{counted(len(maps), 'position')} came back and the window has {counted(len(window.ids), 'token')}",
            )
        if maps[0] is not None:
            raise place.error(
                ScoreError, "the first token has a logprob, so positions are off by one: use the dialect 'tensorrt_llm'"
            )
        rows = [_row(window, maps, i, ask, place.at(i)) for i in positions]
        return window_scores(window, ask, rows, text_keyed=False)

    def recognised(self, found: Findings) -> Asking[bool]:
        """The field is honoured and row i belongs to token i."""
        return (yield from rows_come(found)) and not found.facts["off_by_one"] and found.takes_ids

    def listing(self, found: Findings, k: int) -> Asking[Listing]:
        """The last row."""
        return (yield from last_row(found, k))

    def names_ids(self, able: Capabilities) -> bool:
        """Our own server takes a list of ids for each position."""
        return able.logprob_token_ids


DIALECT = PromptLogprobs()
