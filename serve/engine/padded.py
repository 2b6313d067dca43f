"""The padded runner: the model's own forward on right-padded batches, nothing cached.

For models whose attention does not go through the interface, or whose layers keep other state than keys
and values (Mamba, linear attention). Padding is on the right and the models are causal, so it cannot reach
a real token; sequences are always recomputed from their start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from serve.engine.runner import Runner, Segment
from serve.engine.transfer import upload
from serve.models.body import body_of
from serve.models.load import LoadedModel


class PaddedRunner(Runner):
    """Runs a model's body on padded rows. Segments must start at 0."""

    name = "padded"
    keeps_kv = False

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self._body: Any = body_of(loaded.model)
        self._device = loaded.device

    def _forward(self, tokens: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        """Hidden rows [total, size] in packed order, without the padding."""
        longest = max(segment.length for segment in segments)
        ids = np.zeros((len(segments), longest), dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, segment in enumerate(segments):
            if segment.start:
                raise ValueError("the padded runner keeps nothing: a segment must start at 0")
            ids[row, : segment.length] = tokens[segment.row : segment.row + segment.length]
            mask[row, : segment.length] = 1
        given, seen = upload(self._device, ids, mask)
        with torch.inference_mode():
            out = self._body(
                input_ids=given, attention_mask=None if mask.all() else seen, use_cache=False
            ).last_hidden_state
        return torch.cat([out[row, : segment.length] for row, segment in enumerate(segments)])

    def allocate(self, pages: int) -> None:
        """Nothing is cached, so nothing is allocated."""
