"""Transformers' attention interface: selecting our attention for a model, and what each layer passes to it.

Structure (sliding window, soft-capping, attention sinks, grouped heads) is what the model's own layer
passes to the interface. A layer that passes something else raises UnsupportedModel, and the model
is served by the padded runner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from serve.engine.runner import UnsupportedModel

_SETTLED = "_settled"
_registered: set[str] = set()
_CONTEXT = "_evalgate_context"
_HARMLESS = frozenset(
    {
        *("position_ids", "cache_position", "position_embeddings", "past_key_values", "cache", "use_cache"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        *("dropout", "is_causal", "num_items_in_batch"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    }
)


@dataclass(frozen=True)
class Shape:
    """What one layer asks of attention. plain: nothing that torch's fused attention does not do."""

    scaling: float
    window: int | None  # keys a query sees, itself included; None = all
    softcap: float | None
    sinks: torch.Tensor | None  # [heads] or None

    @property
    def plain(self) -> bool:
        """Whether it is scaling and a window alone."""
        return self.softcap is None and self.sinks is None


def install(model: torch.nn.Module, context: object, implementation: str) -> None:
    """Give every attention layer of `model` its context and select this attention.

    Raises UnsupportedModel where the model does not take another attention.
    """
    layers = 0
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            setattr(module, _CONTEXT, context)
            layers += 1
    if not layers:
        raise UnsupportedModel("its attention layers are not numbered")
    select(model, implementation)


def context_of(module: torch.nn.Module) -> Any:
    """What `install` gave the layer; raises UnsupportedModel for a layer that was not found."""
    context = getattr(module, _CONTEXT, None)
    if context is None:
        raise UnsupportedModel("an attention layer carries no number")
    return context


def select(model: Any, implementation: str) -> None:
    """Switch a transformers model's attention implementation; raises UnsupportedModel if it does not take it."""
    try:
        model.set_attn_implementation(implementation)
    except (ValueError, ImportError, AttributeError, KeyError) as error:
        raise UnsupportedModel(f"it does not take another attention ({error})") from error
    if model.config._attn_implementation != implementation:
        raise UnsupportedModel("it does not take another attention")


def register(implementation: str, attention: Callable[..., Any]) -> None:
    """Make an attention known to transformers, for models under check and for checked ones (`settle`)."""
    AttentionInterface.register(implementation, attention)
    AttentionMaskInterface.register(implementation, no_mask)
    AttentionInterface.register(implementation + _SETTLED, attention)
    _registered.add(implementation)


def settle(model: Any) -> None:
    """After the load-time check of a model with an attention from here: build masks no more.

    `no_mask` has seen that the model overlays none of its own. But before transformers asks it for a mask, it looks at
    the positions of every forward, twice, and a look makes the host wait for the device.
    """
    implementation = str(model.config._attn_implementation)
    if implementation in _registered:
        select(model, implementation + _SETTLED)


def read_shape(
    module: torch.nn.Module, query: torch.Tensor, attention_mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> Shape:
    """Honour or refuse what the layer passes."""
    if attention_mask is not None:
        raise UnsupportedModel("it builds an attention mask of its own")
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        raise UnsupportedModel("its attention is not causal")
    rest = {n: kwargs.pop(n) for n in list(kwargs) if n not in ("scaling", "sliding_window", "softcap", "s_aux")}
    for name, given in rest.items():
        if given is not None and name not in _HARMLESS:
            raise UnsupportedModel(f"its attention passes '{name}'")
    if rest.get("dropout"):
        raise UnsupportedModel("it applies dropout")
    scaling = kwargs.get("scaling")
    return Shape(
        scaling=float(scaling) if scaling is not None else float(query.shape[-1]) ** -0.5,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )


def no_mask(*, use_vmap: bool = False, **_: Any) -> None:
    """The mask builder beside the attention: packed attention knows who sees whom, so no mask is built.

    A model that overlays a mask function of its own (transformers then asks for the vmap path) is refused.
    """
    if use_vmap:
        raise UnsupportedModel("it overlays a mask of its own")
