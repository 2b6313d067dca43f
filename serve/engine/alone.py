"""The runner for models whose numbers depend on what else is in the batch, as those of LLM.int8 do.

Or on the length of the whole forward in a way that no other runner holds still.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from serve.engine.padded import PaddedRunner
from serve.engine.runner import Segment


class AloneRunner(PaddedRunner):
    """Runs one sequence at a time, so that nothing is padded."""

    name = "alone"

    def regime(self, n: int) -> int:
        """Every length is one of its own: not even a prefix of a sequence has the numbers of the sequence."""
        return n

    def _forward(self, tokens: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        """Hidden rows [total, size] in packed order, each segment from a forward of its own."""
        return torch.cat([super(AloneRunner, self)._forward(tokens, [segment]) for segment in segments])
