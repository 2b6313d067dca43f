"""The rows of a step that need logits: their tokens and scores, a tile at a time, brought to the host together.

One pass over the vocabulary for all rows that ask for scores, none for the others, and every list as long as its own
row asks for. On a device a step waits once, at its end, for what its rows gave: `StepRows`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np
import torch

from serve.engine import reduce
from serve.engine.sampling import Picks, nothing_to_choose, pick, plain
from serve.engine.scheduler import Chunk
from serve.engine.sequence import RowScores, Sequence, Wanted
from serve.engine.transfer import Array, Download, upload
from serve.engine.wanted import ranks_of
from serve.errors import ScoringFailed

_NARROW = 32  # lists up to this long are made for all rows of a tile at once
_MOST_HELD = 1 << 26  # bytes on their way to the host before they are waited for: lists of whole vocabularies add up


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
    """What a row gives: the token at its position (sampled, where the row generates) and the scores asked for.

    failure: why there is neither.
    """

    row: Row
    token: int
    scores: RowScores | None
    failure: ScoringFailed | None = None


def needed(chunks: list[Chunk]) -> Iterator[Row]:
    """The rows that a step's sequences and those nested in them need, ascending by hidden row within a sequence."""
    at = 0
    for sequence, start, length, _ in chunks:
        for each in (sequence, *sequence.nested):
            for j in each.rows_needed(start, start + length):
                yield Row(at + j - start, each, j + 1)
        at += length


Reader = Callable[[Many[Array], list[int]], list[RowScores]]  # what came to the host, and the tokens


class StepRows:
    """The tokens and scores of one step's rows, tile by tile."""

    def __init__(self) -> None:
        self._download = Download()
        self._waiting: list[Callable[[Many[Array]], list[Answer]]] = []
        self._answers: list[Answer] = []

    def add_tile(self, rows: list[Row], places: list[int], logits: torch.Tensor, *, whole: bool = False) -> None:
        """Choose and score the tokens of rows, `places` in a tile of logits [rows of the tile, vocabulary].

        whole: reduce all of the tile, however few of its rows ask for scores.
        """
        device, vocabulary = logits.device, logits.shape[1]
        asking = [i for i, row in enumerate(rows) if row.k is not None]
        ks = [_width(rows[i].k, vocabulary) for i in asking]
        at = [places[i] for i in asking]
        scored, top = logits, None
        if asking:
            used = sorted(set(at))
            if not whole and len(used) < logits.shape[0]:
                scored = logits.index_select(0, *upload(device, np.array(used, dtype=np.int64)))
                at = [used.index(place) for place in at]
            top = reduce.top_k(scored, max(2, _narrow(ks)))
        known = [0 if row.generates else row.sequence.tokens[row.at] for row in rows]
        generating, picks = self._pick(rows, places, logits, dict(zip(asking, at, strict=True)), top)
        picked, peak = (self._download.add(part) for part in (picks.tokens.int(), picks.peaks))
        read_scores: Reader | None = None
        if top is not None:
            tokens, places_of, ask_at = upload(
                device, *(np.array(x, dtype=np.int64) for x in (known, generating, asking))
            )
            of = tokens.index_copy(0, places_of, picks.tokens).index_select(0, ask_at)
            named = [rows[i].sequence.ask.wanted_ids(rows[i].at) for i in asking]
            read_scores = begin_scores(self._download, scored, of, at, ks, named, top)

        def read(arrays: Many[Array]) -> list[Answer]:
            failed = {i for i, finite in zip(generating, np.isfinite(arrays[peak]).tolist(), strict=True) if not finite}
            ids = list(known)
            for i, token in zip(generating, arrays[picked].tolist(), strict=True):
                ids[i] = token
            made = read_scores(arrays, [ids[i] for i in asking]) if read_scores else []
            scores = dict(zip(asking, made, strict=True))
            return [
                Answer(row, ids[i], None, nothing_to_choose(row.sequence))
                if i in failed
                else Answer(row, ids[i], scores.get(i))
                for i, row in enumerate(rows)
            ]

        self._waiting.append(read)
        if self._download.bytes > _MOST_HELD:
            self._read()

    def answers(self) -> list[Answer]:
        """What all rows gave, in the order added. On a device this waits for them."""
        self._read()
        return self._answers

    def _read(self) -> None:
        arrays = self._download.fetch()
        for read in self._waiting:
            self._answers += read(arrays)
        self._waiting = []

    def _pick(
        self, rows: list[Row], places: list[int], logits: torch.Tensor, scored: dict[int, int], top: reduce.TopK | None
    ) -> tuple[list[int], Picks]:
        """Which rows generate, and their tokens.

        scored: the place in `top` of each row that asks for scores; one that is greedy has its token there already.
        """
        listed = [i for i in scored if rows[i].generates and plain(rows[i].sequence)]
        others = [i for i, row in enumerate(rows) if row.generates and i not in set(listed)]
        parts = []
        if listed and top is not None:
            (at,) = upload(logits.device, np.array([scored[i] for i in listed], dtype=np.int64))
            parts.append(Picks(top.ids[:, 0].index_select(0, at), top.values[:, 0].index_select(0, at)))
        if others or not parts:
            parts.append(pick(logits, [places[i] for i in others], [rows[i].sequence for i in others]))
        return [*listed, *others], parts[0] if len(parts) == 1 else Picks(*map(torch.cat, zip(*parts, strict=True)))


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
    download = Download()
    rows = list(range(len(tokens))) if rows is None else rows
    (chosen,) = upload(logits.device, np.array(tokens, dtype=np.int64))
    ks = [min(k, logits.shape[1]) for k in ks]
    top = reduce.top_k(logits, max(2, _narrow(ks)))
    return begin_scores(download, logits, chosen, rows, ks, named or [()] * len(tokens), top)(download.fetch(), tokens)


def begin_scores(
    download: Download,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    rows: list[int],
    ks: list[int],
    named: list[tuple[int, ...]],
    top: reduce.TopK,
) -> Reader:
    """`score_rows` of tokens [n] int64 that may be on a device: what is to come to the host, and how it is read there.

    top: the list of every row, as long as the longest list that is not wider than _NARROW, and 2 at least.
    """
    width = top.ids.shape[1]
    # A list of the whole vocabulary costs far more than all else: only the rows that asked for one pay for it.
    wide: dict[int, int] = {}
    for row, k in zip(rows, ks, strict=True):
        if k > _NARROW:
            wide[row] = max(k, wide.get(row, 0))
    flat = [row * width + np.arange(k) for row, k in zip(rows, ks, strict=True) if k <= _NARROW]
    asked = [(row, one) for row, ids in zip(rows, named, strict=True) for one in ids]
    index, listed, of, ids = upload(
        logits.device,
        np.array(rows, dtype=np.int64),
        np.concatenate([np.empty(0, np.int64), *flat]),
        np.array([row for row, _ in asked], dtype=np.int64),
        np.array([one for _, one in asked], dtype=np.int64),
    )
    lse = reduce.log_sum_exp(logits, top.values[:, :1])
    ranks = reduce.ranks(logits, tokens, top, index).int()
    own = [download.add(part) for part in (lse[index], logits[index, tokens], ranks)]
    lists = [download.add(part.reshape(-1)[listed]) for part in (top.ids.int(), top.values)]
    longer: dict[int, list[int]] = {}
    for row, k in wide.items():
        long = reduce.top_k(logits[row : row + 1], k)
        longer[row] = [download.add(part) for part in (long.ids[0].int(), long.values[0])]
    by_name = [download.add(x) for x in (logits[of, ids], _named_ranks(logits, rows, named, ids))] if asked else []

    def read(arrays: Many[Array], chosen: list[int]) -> list[RowScores]:
        sums, logit, rank = (arrays[part] for part in own)
        short_ids, short = arrays[lists[0]].tolist(), arrays[lists[1]].astype(np.float64)
        lengths = [k if k <= _NARROW else 0 for k in ks]
        short_values = (short - np.repeat(sums, lengths)).tolist()
        exact: list[tuple[Wanted, ...]] = [()] * len(rows)
        if by_name:
            values = arrays[by_name[0]].astype(np.float64) - np.repeat(sums, [len(one) for one in named])
            found = iter(map(Wanted, (one for _, one in asked), values.tolist(), arrays[by_name[1]].tolist()))
            exact = [tuple(next(found) for _ in one) for one in named]
        made: list[RowScores] = []
        at = 0
        numbers = zip(chosen, (logit.astype(np.float64) - sums).tolist(), rank.tolist(), strict=True)
        for i, (row, k, number) in enumerate(zip(rows, ks, numbers, strict=True)):
            if k <= _NARROW:
                top_ids, top_logprobs = short_ids[at : at + k], short_values[at : at + k]
                at += k
            else:
                top_ids = arrays[longer[row][0]][:k].tolist()
                top_logprobs = (arrays[longer[row][1]][:k].astype(np.float64) - sums[i]).tolist()
            made.append(RowScores(*number, tuple(top_ids), tuple(top_logprobs), exact[i]))
        return made

    return read


def _named_ranks(
    logits: torch.Tensor, rows: list[int], named: list[tuple[int, ...]], ids: torch.Tensor
) -> torch.Tensor:
    """Ranks [m] int32 of the ids that rows are asked about by name, in their order."""
    found: list[torch.Tensor] = []
    at = 0
    for row, asked in zip(rows, named, strict=True):
        if asked:
            found.append(ranks_of(logits[row], ids[at : at + len(asked)]).int())
            at += len(asked)
    return torch.cat(found)


def _narrow(ks: list[int]) -> int:
    return max((k for k in ks if k <= _NARROW), default=0)


def _width(k: int | None, vocabulary: int) -> int:
    return vocabulary if k == -1 else min(k or 0, vocabulary)


def check_finite(scores: RowScores, at: int, model: str) -> None:
    """Raise ScoringFailed for a NaN or +infinity; -inf is a number here: a model may rule a token out."""
    if any(math.isnan(x) or x == math.inf for x in (scores.logprob, *scores.top_logprobs)):
        raise ScoringFailed(f"{model} gives a non-finite logprob for token {scores.token} at position {at}")
