"""What a GGUF file holds against what transformers reads of it: every tensor is used, or refused by name.

transformers' reader drops tensors that it has no place for without a word. Half a model, a model without its
attention biases and one with other rotary frequencies load as if nothing were missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from serve.errors import LoadFailed

ROPE_FACTORS = "rope_freqs.weight"
_BLOCK = re.compile(r"blk\.(\d+)\.")
_SHOWN = 3


def check_blocks(reader: Any, *, name: str) -> None:
    """Refuse a file whose block_count is not the number of blocks in it, before anything is built from that number."""
    architecture = _field(reader, "general.architecture")
    stated = _field(reader, f"{architecture}.block_count")
    further = _field(reader, f"{architecture}.nextn_predict_layers") or 0  # blocks that predict further tokens
    present = {int(match[1]) for tensor in reader.tensors if (match := _BLOCK.match(tensor.name))}
    if not isinstance(stated, int) or not present:
        return
    if not stated - further <= len(present) <= stated + further or max(present) >= len(present):
        raise LoadFailed(
            f"'{name}' says that it has {stated} blocks and holds {len(present)}: it was put together wrongly, "
            "convert the model again"
        )


def check_scaling(reader: Any, config: Any, *, name: str) -> None:
    """Refuse a stretched context that transformers' reader leaves out of the configuration."""
    architecture = _field(reader, "general.architecture")
    kind = _field(reader, f"{architecture}.rope.scaling.type")
    old = _field(reader, f"{architecture}.rope.scale_linear")
    read = _rope(config).get("rope_type", "default")
    if kind in (None, "none", read) and old in (None, 0.0, 1.0):
        return
    raise LoadFailed(
        f"'{name}' scales its rotary positions ({kind or 'linear'}), which transformers does not read from GGUF files: "
        "give the checkpoint that it was made from"
    )


def apply_rope_factors(reader: Any, config: Any, *, name: str) -> frozenset[str]:
    """Put the file's factors of the rotary frequencies into the configuration; returns the tensors used so.

    llama.cpp divides each frequency by its factor. So does LongRoPE, whose short and long factors are then the same
    (Llama 3.1 to 3.3 have their scaling only in this tensor). Raises LoadFailed where the model has other frequencies.
    """
    found = next((tensor for tensor in reader.tensors if tensor.name == ROPE_FACTORS), None)
    if found is None:
        return frozenset()
    rope = _rope(config)
    if rope.get("rope_type", "default") != "default" or "rope_theta" not in rope:
        raise LoadFailed(
            f"'{name}' has {ROPE_FACTORS}, which cannot be applied to this architecture ({config.model_type})"
        )
    factors = [float(factor) for factor in found.data.reshape(-1)]
    config.rope_parameters = {
        **rope,
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config.max_position_embeddings,
    }
    return frozenset({ROPE_FACTORS})


@contextmanager
def watched() -> Iterator[set[str]]:
    """Collect the names of tensors that transformers' reader has no place for, during one load."""
    from transformers import modeling_gguf_pytorch_utils as reading

    missed: set[str] = set()

    class Watched(dict[str, str]):
        def __contains__(self, key: object) -> bool:
            found = super().__contains__(key)
            if not found and isinstance(key, str):  # None stands for a tensor that was dealt with
                missed.add(key)
            return found

    original = reading.get_gguf_hf_weights_map

    def mapping(*args: Any, **options: Any) -> Watched:
        places = Watched(original(*args, **options))
        missed.clear()  # what the map itself was asked while it was made
        return places

    reading.get_gguf_hf_weights_map = mapping
    try:
        yield missed
    finally:
        reading.get_gguf_hf_weights_map = original


def refuse_unused(missed: set[str], *, name: str) -> None:
    """Raise LoadFailed naming the tensors that would be left out."""
    if missed:
        ordered = sorted(missed)
        more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
        raise LoadFailed(
            f"'{name}' has tensors that transformers does not use for this architecture: "
            f"{', '.join(ordered[:_SHOWN])}{more}; give the checkpoint that it was made from"
        )


def _rope(config: Any) -> dict[str, Any]:
    return dict(getattr(config, "rope_parameters", None) or {})


def _field(reader: Any, key: str) -> Any:
    found = reader.fields.get(key)
    return None if found is None else found.contents()
