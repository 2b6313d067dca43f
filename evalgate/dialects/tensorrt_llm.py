"""TensorRT-LLM's `prompt_logprobs`: row i predicts token i+1, one off against vLLM.

The rows need not list the actual token; where it is missing it is censored. So that a server with vLLM's
alignment is not read one off, the actual tokens must be found at this alignment at least as often as at
that one.
"""

from __future__ import annotations

from typing import Any

from evalgate.core import Window, counted
from evalgate.dialects.base import Ask, Asking, Dialect, Exchange, Place, Request
from evalgate.dialects.body import check_prompt, only_choice, read_body
from evalgate.dialects.findings import Findings
from evalgate.dialects.generation import COMPLETIONS
from evalgate.dialects.idmaps import last_row, prompt_maps, read_map, rows_come
from evalgate.dialects.listings import Listing
from evalgate.dialects.rows import score_position, window_scores
from evalgate.errors import ScoreError

PATH = "/v1/completions"


def _check_alignment(maps: list[Any], ids: tuple[int, ...], place: Place) -> None:
    """n rows (the last predicts what follows the window) or n-1; ScoreError for anything else."""
    if maps[0] is None:
        raise place.error(ScoreError, "the first token has no logprobs, as in vLLM: use the dialect 'prompt_logprobs'")
    if len(maps) not in (len(ids), len(ids) - 1):
        raise place.error(
            ScoreError, f"{counted(len(maps), 'position')} came back and the window has {counted(len(ids), 'token')}"
        )
    shifted = sum(isinstance(row, dict) and str(t) in row for row, t in zip(maps, ids[1:], strict=False))
    straight = sum(isinstance(row, dict) and str(t) in row for row, t in zip(maps[1:], ids[1:], strict=False))
    if straight > shifted:
        raise place.error(ScoreError, "row i predicts token i and not token i+1: use the dialect 'prompt_logprobs'")


class TensorRT(Dialect):
    """TensorRT-LLM's `prompt_logprobs`; see the top of this file."""

    summary = "TensorRT-LLM's prompt_logprobs, where row i predicts token i+1"
    order = 10
    prompt_scoring = True
    generation = COMPLETIONS

    def score_window(self, window: Window, ask: Ask) -> Exchange:
        """Score a window with one request."""
        positions = ask.positions_in(window)
        place = Place(PATH, window.index)
        fields = {
            "model": ask.model,
            "prompt": list(window.ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": ask.k,
        }
        (reply,) = yield (Request("POST", PATH, fields),)
        body = read_body(reply, place, k=ask.k)
        choice = only_choice(body, place)
        check_prompt(body, choice, window.ids, place)
        maps = prompt_maps(body, choice, place)
        _check_alignment(maps, window.ids, place)
        rows = []
        for i in positions:
            entries, rank, _ = read_map(maps[i - 1], window.ids[i], place.at(i))
            rows.append(score_position(window.ids[i], entries, ask, place.at(i), server_rank=rank))
        return window_scores(window, ask, rows, text_keyed=False)

    def recognised(self, found: Findings) -> Asking[bool]:
        """The field is honoured and row i belongs to token i+1."""
        return (yield from rows_come(found)) and found.facts["off_by_one"] and found.takes_ids

    def listing(self, found: Findings, k: int) -> Asking[Listing]:
        """The last row."""
        return (yield from last_row(found, k))


DIALECT = TensorRT()
