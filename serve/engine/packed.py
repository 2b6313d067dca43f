"""The packed runner: one forward over sequences of different lengths, no padding, KV in pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from serve.engine.attention import NAME, Context, KVPages, Stored
from serve.engine.interface import install
from serve.engine.runner import Runner, Segment, UnsupportedModel
from serve.engine.transfer import upload
from serve.models.body import body_of
from serve.models.load import LoadedModel
from serve.models.scheme import is_quantized


class PackedRunner(Runner):
    """Runs a model's body on packed rows. Until pages are allocated, only segments without pages can run."""

    name = "packed"
    keeps_kv = True

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        refuse_other_state(loaded.model)
        self._body: Any = body_of(loaded.model)
        self._device = loaded.device
        self._head_device = _head_device(loaded.model)
        self.context = Context(Stored())
        self._parallel = _keeps_still(loaded)
        install(loaded.model, self.context, NAME)

    @property
    def parallel(self) -> bool:
        """See `Runner`."""
        return self._parallel and self.lengths.none

    def _forward(self, tokens: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        """Hidden rows [total, size] of the packed tokens; `segments` tile [0, total)."""
        positions = np.concatenate([np.arange(s.start, s.start + s.length) for s in segments])
        self.context.begin(segments)
        ids, at = upload(self._device, np.array(tokens, dtype=np.int64), positions)
        with torch.inference_mode():
            out = self._body(input_ids=ids[None], position_ids=at[None], use_cache=False)
        if self.context.seen == 0:
            raise UnsupportedModel("its layers do not go through the attention interface")
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden if self._head_device is None else hidden.to(self._head_device)

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers, known after the first forward."""
        return sum(self.context.stored.token_bytes.values())

    def allocate(self, pages: int) -> None:
        """Make room for `pages` tokens; the tensors come into being layer by layer at first use."""
        self.context.stored.kv = KVPages(pages)


def _keeps_still(loaded: LoadedModel) -> bool:
    """Whether a forward changes nothing in the model: packed weights may be unpacked, and notes kept, in the first."""
    weights = loaded.model.parameters()
    return all(type(w) is torch.nn.Parameter and w.device.type == "cpu" for w in weights) and not is_quantized(
        loaded.model
    )


def _head_device(model: Any) -> torch.device | None:
    """Where hidden rows are multiplied, for a model that is on several devices; None for all others."""
    places = set(getattr(model, "hf_device_map", {}).values())
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    return weight.device if len(places) > 1 and isinstance(weight, torch.Tensor) else None


_STATEFUL = ("linear_attention", "mamba", "recurrent", "conv", "chunked_attention", "hybrid")


def refuse_other_state(model: Any) -> None:
    """Raise UnsupportedModel for layers that keep other state than keys and values, or chunked masks.

    They are recognised from the configuration, because a probe shorter than a chunk would not notice.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) | set(getattr(config, "layers_block_type", None) or ())
    for kind in sorted(kinds - {"full_attention", "sliding_attention"}):
        if any(word in kind for word in _STATEFUL) or kind not in ("attention",):
            raise UnsupportedModel(f"it has layers of kind '{kind}'")
    if getattr(config, "attention_chunk_size", None):
        raise UnsupportedModel("it attends in chunks")
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModel("its layers keep recurrent state")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel("it is an encoder-decoder")
