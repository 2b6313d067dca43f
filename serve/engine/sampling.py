"""Choosing the next token from raw logits. Never touches a reported logprob."""

from __future__ import annotations

import torch

from serve.engine.sequence import Sequence


def choose(sequence: Sequence, logits: torch.Tensor) -> int:
    """The next token of one sequence from its raw logits [vocabulary].

    Greedy (temperature 0) takes the largest logit, the smallest id among equals. Otherwise a draw from
    softmax(logits / temperature), seeded by (seed, number of tokens generated) where a seed is given.
    """
    ask = sequence.ask
    allowed = (
        torch.as_tensor(sorted(set(ask.allowed_token_ids)), device=logits.device) if ask.allowed_token_ids else None
    )
    pool = logits if allowed is None else logits[allowed]
    if ask.temperature == 0:
        best = int(torch.nonzero(pool == pool.max())[0, 0])
    else:
        generator = torch.Generator(device="cpu")
        if ask.seed is None:
            generator.seed()
        else:
            generator.manual_seed((ask.seed * 1_000_003 + sequence.generated) % (1 << 63))
        weights = torch.softmax(pool.double().cpu() / ask.temperature, dim=0)
        draw = torch.rand(1, generator=generator, dtype=torch.float64)
        best = min(int(torch.searchsorted(weights.cumsum(0), draw)), weights.shape[0] - 1)
    return best if allowed is None else int(allowed[best])
