"""Choosing the next token from raw logits. Never touches a reported logprob.

Order, as vLLM applies them: repetition, frequency and presence penalties, logit bias, allowed ids and stop
tokens that are not due yet; then temperature, min_p, top_k, top_p. Everything after the logits is float64.
A draw depends on the seed, the number of tokens generated so far and the logits, on nothing else: the same
seed gives the same text whatever else is in the batch.

On a CPU the rows are gone through one by one. On a device they are drawn together and stay there: nothing is waited
for, and what leaves the device is the chosen ids. There the weights are summed as whole numbers, because a device adds
in whatever order suits the number of rows, and only whole numbers have one sum in every order.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np
import torch

from serve.engine.sequence import Ask, Sequence
from serve.engine.transfer import Array, upload
from serve.errors import ScoringFailed

_TOGETHER = 32  # rows that a device draws at once: bounds the copies of their logits


class Picks(NamedTuple):
    """tokens [n] int64, and each row's largest logit after penalties, bias and masks, [n] float32.

    Where the largest is not finite there was nothing to choose: the token means nothing (`nothing_to_choose`).
    """

    tokens: torch.Tensor
    peaks: torch.Tensor


def choose(sequence: Sequence, logits: torch.Tensor) -> int:
    """The next token of one sequence from its raw float32 logits [vocabulary], which stay as they are.

    Greedy (temperature 0) takes the largest value, the smallest id among equals. Raises ScoringFailed where
    there is no finite logit to choose.
    """
    picks = pick(logits[None], [0], [sequence])
    if not math.isfinite(float(picks.peaks[0])):
        raise nothing_to_choose(sequence)
    return int(picks.tokens[0])


def nothing_to_choose(sequence: Sequence) -> ScoringFailed:
    """The error of a sequence whose next row has no finite largest logit."""
    return ScoringFailed(f"the logits at position {len(sequence.tokens)} have no finite largest value")


def plain(sequence: Sequence) -> bool:
    """Whether its next token is simply the first of the top-k list of the raw logits."""
    return sequence.ask.temperature == 0 and not _touches(sequence)


def pick(logits: torch.Tensor, rows: Many[int], sequences: Many[Sequence]) -> Picks:
    """The next token of each sequence from its row of the raw logits [rows, vocabulary], which stay as they are."""
    if logits.device.type == "cpu":
        chosen = [_pick_on_host(logits[row], sequence) for row, sequence in zip(rows, sequences, strict=True)]
        tokens, peaks = zip(*chosen, strict=True) if chosen else ((), ())
        return Picks(torch.tensor(tokens, dtype=torch.int64), torch.tensor(peaks, dtype=torch.float32))
    if not rows:
        return Picks(torch.empty(0, dtype=torch.int64, device=logits.device), logits.new_empty(0))
    parts = [
        pick_together(logits, rows[low : low + _TOGETHER], sequences[low : low + _TOGETHER])
        for low in range(0, len(rows), _TOGETHER)
    ]
    return parts[0] if len(parts) == 1 else Picks(*map(torch.cat, zip(*parts, strict=True)))


def uniform(seed: int | None, step: int) -> float:
    """A number in [0, 1): of (seed, step) alone where there is a seed."""
    if seed is None:
        return random.random()
    digest = hashlib.blake2b(f"{seed}:{step}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def kept(values: torch.Tensor, ask: Ask) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids that may be drawn and their weights (float64, not normalised), likeliest first, then by id.

    values: adjusted logits [vocabulary] on the host. min_p drops what is less likely than min_p times the likeliest;
    top_k keeps k; top_p keeps the fewest whose mass reaches it. At least one is kept.
    """
    scaled = values.detach().double()
    weights = torch.exp((scaled - scaled.max()) / ask.temperature)
    if not _cuts(ask):
        return torch.arange(weights.shape[0]), weights
    order = torch.argsort(scaled, descending=True, stable=True)
    weights = weights[order]
    if ask.min_p:
        weights = weights[: max(1, int((weights >= ask.min_p).sum()))]
    if ask.top_k:
        weights = weights[: ask.top_k]
    if ask.top_p < 1:
        mass = weights.cumsum(0)
        weights = weights[: int((mass < ask.top_p * mass[-1]).sum()) + 1]
    return order[: weights.shape[0]], weights


def _pick_on_host(logits: torch.Tensor, sequence: Sequence) -> tuple[int, float]:
    """The token of one row [vocabulary] on a CPU, and the row's largest logit after penalties, bias and masks."""
    values, ask = logits, sequence.ask
    if _touches(sequence):
        values = logits.clone()[None]
        _Changes.of([sequence], values.shape[1]).apply(values)
        values = values[0]
    token = int(values.numpy().argmax())  # numpy promises the first of equals, in one fast pass
    peak = float(values[token])
    if ask.temperature == 0 or not math.isfinite(peak):
        return token, peak
    ids, weights = kept(values, ask)
    total = weights.cumsum(0)
    drawn = int(torch.searchsorted(total, uniform(ask.seed, sequence.generated) * float(total[-1]), right=True))
    return int(ids[min(drawn, ids.shape[0] - 1)]), peak


def pick_together(logits: torch.Tensor, rows: Many[int], sequences: Many[Sequence]) -> Picks:
    """`pick` without looking at a value: what a device does, with the draws of `kept` but for the last digits."""
    device, vocabulary = logits.device, logits.shape[1]
    (at,) = upload(device, np.array(rows, dtype=np.int64))
    values = logits.index_select(0, at)
    if any(map(_touches, sequences)):
        _Changes.of(sequences, vocabulary).apply(values)
    peaks, tokens = values.max(1)  # torch promises the first of equals
    for cuts in (False, True):
        drawing = [i for i, s in enumerate(sequences) if s.ask.temperature and _cuts(s.ask) == cuts]
        if drawing:
            which, *numbers = upload(
                device, np.array(drawing, dtype=np.int64), *_numbers(sequences, drawing, vocabulary)
            )
            drawn = _draw(values.index_select(0, which), peaks.index_select(0, which), _Numbers(*numbers), cuts=cuts)
            tokens = tokens.index_copy(0, which, drawn)
    return Picks(tokens, peaks)


class _Numbers(NamedTuple):
    """What rows are drawn with, [n, 1] each: float64, top_k int64 (the vocabulary where nothing is cut)."""

    temperature: torch.Tensor
    uniform: torch.Tensor
    min_p: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor


def _numbers(sequences: Many[Sequence], drawing: Many[int], vocabulary: int) -> list[Array]:
    some = [sequences[i] for i in drawing]
    asks = [sequence.ask for sequence in some]
    columns: list[list[float]] = [
        [ask.temperature for ask in asks],
        [uniform(sequence.ask.seed, sequence.generated) for sequence in some],
        [ask.min_p for ask in asks],
        [ask.top_p for ask in asks],
    ]
    top_k = [min(ask.top_k, vocabulary) or vocabulary for ask in asks]
    return [*(np.array(c, dtype=np.float64)[:, None] for c in columns), np.array(top_k, dtype=np.int64)[:, None]]


def _draw(values: torch.Tensor, peaks: torch.Tensor, by: _Numbers, *, cuts: bool) -> torch.Tensor:
    """One id of each row [n, vocabulary] of adjusted logits, whose largest is given; [n] int64."""
    vocabulary = values.shape[1]
    order = None
    if cuts:
        values, order = values.sort(dim=1, descending=True, stable=True)
    weights = ((values.double() - peaks.double()[:, None]) / by.temperature).exp_()
    # The likeliest id weighs 2**bits, so that the sum of a whole row still fits 62 bits.
    mass = (weights * float(1 << (62 - vocabulary.bit_length()))).long().cumsum(1)
    total = mass[:, -1:]
    if cuts:
        n = (weights >= by.min_p).sum(1, keepdim=True).clamp_(min=1).minimum(by.top_k)
        total = mass.gather(1, n - 1)
        below = (mass.double() < by.top_p * total.double()).sum(1, keepdim=True)
        n = torch.where(by.top_p < 1, (below + 1).minimum(n), n)
        total = mass.gather(1, n - 1)
    target = (by.uniform * total.double()).long().minimum(total - 1)
    # No id without weight is the first whose running sum is above the target. A row of NaNs has no such id at all.
    at = torch.searchsorted(mass, target, right=True).clamp_(max=vocabulary - 1)
    return (at if order is None else order.gather(1, at))[:, 0]


def _cuts(ask: Ask) -> bool:
    """Whether some ids may not be drawn because of how likely they are."""
    return bool(ask.min_p or ask.top_k or ask.top_p < 1)


def _touches(sequence: Sequence) -> bool:
    """Whether penalties, bias or masks change the logits of its next token."""
    ask = sequence.ask
    return bool(
        ask.repetition_penalty != 1
        or ((ask.presence_penalty or ask.frequency_penalty) and sequence.generated)
        or ask.logit_bias
        or ask.allowed_token_ids
        or (ask.stop_token_ids and sequence.generated < ask.min_tokens)
    )


class _Changes(NamedTuple):
    """Logits that penalties, bias and masks change: [m] each, no (row, token) twice.

    only [rows, 1]: whether no other ids than these are allowed.

    Repetition (prompt and generated tokens): a positive logit is divided, a negative one multiplied. Then the OpenAI
    penalties (generated tokens only: frequency times count, presence once) are subtracted, the bias is added, and
    `closed` ids get -inf.
    """

    row: Array
    token: Array
    factor: Array
    minus: Array
    plus: Array
    closed: Array
    only: Array

    @classmethod
    def of(cls, sequences: Many[Sequence], vocabulary: int) -> _Changes:
        """The changes of each sequence's next row."""
        parts = [_changes(sequence, vocabulary) for sequence in sequences]
        row = np.repeat(np.arange(len(parts)), [len(part[0]) for part in parts])
        token, factor, minus, plus, closed = (np.concatenate(column) for column in zip(*parts, strict=True))
        return cls(
            row, token, factor, minus, plus, closed, np.array([[bool(s.ask.allowed_token_ids)] for s in sequences])
        )

    def apply(self, values: torch.Tensor) -> None:
        """Change values [rows, vocabulary] in place, without looking at one."""
        row, token, factor, minus, plus, closed, only = upload(values.device, *self)
        seen = values[row, token]
        seen = torch.where(seen > 0, seen / factor, seen * factor) - minus + plus
        seen = seen.masked_fill(closed, -math.inf)
        if self.only.any():
            values.masked_fill_(only, -math.inf)
        values.index_put_((row, token), seen)


def _changes(sequence: Sequence, vocabulary: int) -> tuple[Array, ...]:
    """(token, factor, minus, plus, closed) of one sequence's next row."""
    ask = sequence.ask
    repeated = np.unique(sequence.tokens) if ask.repetition_penalty != 1 else np.empty(0, np.int64)
    counted, times = np.empty(0, np.int64), np.empty(0, np.int64)
    if ask.presence_penalty or ask.frequency_penalty:
        counted, times = np.unique(np.array(sequence.tokens[len(ask.prompt) :], dtype=np.int64), return_counts=True)
    bias = dict(ask.logit_bias)
    held = ask.stop_token_ids if sequence.generated < ask.min_tokens else frozenset()
    allowed = np.array(sorted(set(ask.allowed_token_ids)), dtype=np.int64)
    given = [repeated, counted, np.array(list(bias), np.int64), np.array(sorted(held), np.int64), allowed]
    token = np.unique(np.concatenate(given).astype(np.int64))
    token = token[token < vocabulary]
    if len(allowed):
        token = token[np.isin(token, allowed)]
    factor = np.where(np.isin(token, repeated), np.float32(ask.repetition_penalty), np.float32(1))
    minus = np.zeros(len(token), np.float32)
    if len(counted):
        of = np.isin(token, counted)
        count = times[np.searchsorted(counted, token[of])].astype(np.float32)
        minus[of] = np.float32(ask.frequency_penalty) * count + np.float32(ask.presence_penalty)
    plus = np.array([bias.get(int(one), 0.0) for one in token], dtype=np.float32)
    return token, factor, minus, plus, np.isin(token, np.array(sorted(held), np.int64))
