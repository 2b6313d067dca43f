"""Exact ranks of ids that a request names, beside the chosen token and the top-k."""

from __future__ import annotations

import torch

from serve.engine.reduce import ahead, ahead_in_row

_SORT_FROM = 512  # ids, on a CPU: from here one sort of the row is cheaper than a count for each
_SORT_FROM_ELSEWHERE = 64


def ranks_of(row: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The rank [n] int64 of each id [n] in one row of logits [vocabulary]: value descending, then id ascending.

    On a device nothing is waited for.
    """
    host = row.device.type == "cpu"
    if ids.shape[0] >= (_SORT_FROM if host else _SORT_FROM_ELSEWHERE):
        order = torch.argsort(row, descending=True, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(1, row.shape[0] + 1, device=row.device)
        return place[ids]
    if host:
        return torch.tensor([1 + ahead_in_row(row, token) for token in ids.tolist()], dtype=torch.int64)
    return 1 + ahead(row.expand(ids.shape[0], -1), ids)
