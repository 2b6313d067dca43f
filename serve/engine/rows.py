"""The rows of a step that need logits, and their scores: one sum for all that ask, none for the others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from serve.engine import reduce
from serve.engine.scheduler import Chunk
from serve.engine.sequence import RowScores, Sequence
from serve.engine.wanted import score_wanted
from serve.errors import ScoringFailed


class Row(NamedTuple):
    """A row of hidden states that a sequence needs: it predicts tokens[at] of the sequence."""

    hidden_row: int
    sequence: Sequence
    at: int

    @property
    def generates(self) -> bool:
        """Whether it gives a new token."""
        return self.at == len(self.sequence.tokens)

    @property
    def k(self) -> int | None:
        """How much is asked about it."""
        return self.sequence.k_at(self.at)


class Answer(NamedTuple):
    """What a row gives: the token at its position (sampled, where the row generates) and the scores asked for."""

    row: Row
    token: int
    scores: RowScores | None


def needed(chunks: list[Chunk]) -> Iterator[Row]:
    """The rows that a step's sequences and those nested in them need, ascending by hidden row within a sequence."""
    at = 0
    for sequence, start, length, _ in chunks:
        for each in (sequence, *sequence.nested):
            for j in each.rows_needed(start, start + length):
                yield Row(at + j - start, each, j + 1)
        at += length


_NARROW = 32  # lists up to this long are made for all rows of a tile at once


def score_rows(
    logits: torch.Tensor,
    tokens: list[int],
    ks: list[int],
    named: list[tuple[int, ...]] | None = None,
    rows: list[int] | None = None,
) -> list[RowScores]:
    """Score tokens against rows of logits [rows, vocabulary]: one sum over all rows, and lists as long as asked for.

    ks: how many of the likeliest each answer has. named: ids that each answer scores exactly. rows: the row that
    each token is looked up in; None = one token for each row in turn.
    """
    rows = list(range(len(tokens))) if rows is None else rows
    index = torch.as_tensor(rows, device=logits.device)
    chosen = torch.as_tensor(tokens, device=logits.device)
    # A list of the whole vocabulary costs far more than all else: only the rows that asked for one pay for it.
    width = max((k for k in ks if k <= _NARROW), default=0)
    wide: dict[int, int] = {}
    for row, k in zip(rows, ks, strict=True):
        if k > _NARROW:
            wide[row] = max(k, wide.get(row, 0))
    top = reduce.top_k(logits, max(2, width))
    lse = reduce.log_sum_exp(logits, top.values[:, :1])
    logprob = (logits[index, chosen].double() - lse[index]).tolist()
    rank = reduce.ranks(logits, chosen, top, index).tolist()
    ids = top.ids[:, :width].tolist()
    values = (top.values[:, :width].double() - lse[:, None]).tolist()
    for row, k in wide.items():
        long = reduce.top_k(logits[row : row + 1], k)
        ids[row], values[row] = long.ids[0].tolist(), (long.values[0].double() - lse[row]).tolist()
    by_name = [score_wanted(logits[row], asked, float(lse[row])) for row, asked in zip(rows, named or (), strict=False)]
    return [
        RowScores(token, logprob[i], rank[i], tuple(ids[row][:k]), tuple(values[row][:k]), by_name[i] if named else ())
        for i, (token, row, k) in enumerate(zip(tokens, rows, ks, strict=True))
    ]


def check_finite(scores: RowScores, at: int, model: str) -> None:
    """Raise ScoringFailed for a NaN or +infinity; -inf is a number here: a model may rule a token out."""
    if any(math.isnan(x) or x == math.inf for x in (scores.logprob, *scores.top_logprobs)):
        raise ScoringFailed(f"{model} gives a non-finite logprob for token {scores.token} at position {at}")
