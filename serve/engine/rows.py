"""The rows of a step that need logits, and their scores: one reduction for all that ask, none for the others."""

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


def score_rows(
    logits: torch.Tensor,
    tokens: list[int],
    ks: list[int],
    named: list[tuple[int, ...]] | None = None,
    rows: list[int] | None = None,
) -> list[RowScores]:
    """Score tokens against rows of logits [rows, vocabulary]: one reduction over all rows, at the largest k.

    ks: how many of the likeliest each answer has. named: ids that each answer scores exactly. rows: the row that
    each token is looked up in; None = one token for each row in turn.
    """
    rows = list(range(len(tokens))) if rows is None else rows
    index = torch.as_tensor(rows, device=logits.device)
    chosen = torch.as_tensor(tokens, device=logits.device)
    width = max(ks)
    of = reduce.marginal(logits, width)
    logprob = (logits[index, chosen].double() - of.lse[index]).tolist()
    rank = reduce.ranks(logits, chosen, of.top, index).tolist()
    ids = of.top.ids[:, :width].tolist()
    values = (of.top.values[:, :width].double() - of.lse[:, None]).tolist()
    by_name = [
        score_wanted(logits[row], asked, float(of.lse[row])) for row, asked in zip(rows, named or (), strict=False)
    ]
    return [
        RowScores(token, logprob[i], rank[i], tuple(ids[row][:k]), tuple(values[row][:k]), by_name[i] if named else ())
        for i, (token, row, k) in enumerate(zip(tokens, rows, ks, strict=True))
    ]


def check_finite(scores: RowScores, at: int, model: str) -> None:
    """Raise ScoringFailed for a NaN or +infinity; -inf is a number here: a model may rule a token out."""
    if any(math.isnan(x) or x == math.inf for x in (scores.logprob, *scores.top_logprobs)):
        raise ScoringFailed(f"{model} gives a non-finite logprob for token {scores.token} at position {at}")
