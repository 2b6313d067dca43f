"""Choosing the next token from raw logits. Never touches a reported logprob.

Order, as vLLM applies them: repetition, frequency and presence penalties, logit bias, allowed ids and stop
tokens that are not due yet; then temperature, min_p, top_k, top_p. Everything after the logits is float64.
A draw depends on the seed, the number of tokens generated so far and the logits, on nothing else: the same
seed gives the same text whatever else is in the batch.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter

import torch

from serve.engine.sequence import Ask, Sequence
from serve.errors import ScoringFailed


def choose(sequence: Sequence, logits: torch.Tensor) -> int:
    """The next token of one sequence from its raw float32 logits [vocabulary], which stay as they are.

    Greedy (temperature 0) takes the largest value, the smallest id among equals. Raises ScoringFailed where
    there is no finite logit to choose.
    """
    ask = sequence.ask
    values = _adjusted(sequence, logits)
    token, peak = _largest(values)
    if not math.isfinite(peak):
        raise ScoringFailed(f"the logits at position {len(sequence.tokens)} have no finite largest value")
    if ask.temperature == 0:
        return token
    ids, weights = kept(values, ask)
    total = weights.cumsum(0)
    drawn = int(torch.searchsorted(total, uniform(ask.seed, sequence.generated) * float(total[-1]), right=True))
    return int(ids[min(drawn, ids.shape[0] - 1)])


def _largest(values: torch.Tensor) -> tuple[int, float]:
    """The smallest id of the largest value, and that value; NaN where there is one."""
    if values.device.type == "cpu":  # numpy promises the first of equals, in one fast pass; torch promises neither
        token = int(values.numpy().argmax())
        return token, float(values[token])
    peak = float(values.max())
    return (int(torch.nonzero(values == peak)[0, 0]) if math.isfinite(peak) else 0), peak


def uniform(seed: int | None, step: int) -> float:
    """A number in [0, 1): of (seed, step) alone where there is a seed."""
    if seed is None:
        return random.random()
    digest = hashlib.blake2b(f"{seed}:{step}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def kept(values: torch.Tensor, ask: Ask) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids that may be drawn and their weights (float64, not normalised), likeliest first, then by id.

    values: adjusted logits [vocabulary]. min_p drops what is less likely than min_p times the likeliest;
    top_k keeps k; top_p keeps the fewest whose mass reaches it. At least one is kept.
    """
    scaled = values.detach().cpu().double()
    weights = torch.exp((scaled - scaled.max()) / ask.temperature)
    if not (ask.min_p or ask.top_k or ask.top_p < 1):
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


def _adjusted(sequence: Sequence, logits: torch.Tensor) -> torch.Tensor:
    """Logits after penalties, bias and masks; the very same tensor where none is asked for."""
    ask = sequence.ask
    held = ask.stop_token_ids if sequence.generated < ask.min_tokens else frozenset()
    penalised = ask.presence_penalty or ask.frequency_penalty or ask.repetition_penalty != 1
    if not (penalised or ask.logit_bias or ask.allowed_token_ids or held):
        return logits
    values = logits.clone()
    if penalised:
        _penalise(values, sequence)
    if ask.logit_bias:
        ids = torch.as_tensor([token for token, _ in ask.logit_bias], device=values.device)
        values[ids] += torch.as_tensor([bias for _, bias in ask.logit_bias], device=values.device)
    if ask.allowed_token_ids:
        allowed = torch.zeros(values.shape[0], dtype=torch.bool, device=values.device)
        allowed[list(ask.allowed_token_ids)] = True
        values.masked_fill_(~allowed, -math.inf)
    if held:
        values[list(held)] = -math.inf
    return values


def _penalise(values: torch.Tensor, sequence: Sequence) -> None:
    """Repetition (prompt and generated tokens: divide a positive logit, multiply a negative one), then the
    OpenAI penalties (generated tokens only: frequency times count, presence once), in place."""
    ask = sequence.ask
    if ask.repetition_penalty != 1:
        ids = torch.as_tensor(sorted(set(sequence.tokens)), device=values.device)
        seen = values[ids]
        values[ids] = torch.where(seen > 0, seen / ask.repetition_penalty, seen * ask.repetition_penalty)
    counts = Counter(sequence.tokens[len(ask.prompt) :])
    if counts and (ask.presence_penalty or ask.frequency_penalty):
        ids = torch.as_tensor(list(counts), device=values.device)
        times = torch.as_tensor(list(counts.values()), dtype=values.dtype, device=values.device)
        values[ids] -= ask.frequency_penalty * times + ask.presence_penalty
