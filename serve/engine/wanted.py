"""Exact scores of ids that a request names, beside the chosen token and the top-k."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from serve.engine.reduce import ahead_in_row
from serve.engine.sequence import Wanted

_SORT_FROM = {"cpu": 512}  # ids: from here one sort of the row is cheaper than a count for each
_SORT_FROM_ELSEWHERE = 64


def score_wanted(row: torch.Tensor, ids: Sequence[int], lse: float) -> tuple[Wanted, ...]:
    """(id, logprob, rank) of each id in one row of logits [vocabulary], in the order given.

    lse: the row's log-sum-exp. Ranks follow the one order: value descending, then id ascending.
    """
    if not ids:
        return ()
    index = torch.as_tensor(list(ids), device=row.device)
    values = (row[index].double() - lse).tolist()
    return tuple(map(Wanted, ids, values, _ranks(row, index)))


def _ranks(row: torch.Tensor, index: torch.Tensor) -> list[int]:
    if index.shape[0] >= _SORT_FROM.get(row.device.type, _SORT_FROM_ELSEWHERE):
        order = torch.argsort(row, descending=True, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(1, row.shape[0] + 1, device=row.device)
        return place[index].tolist()
    return [1 + ahead_in_row(row, token) for token in index.tolist()]
