"""A tiny random Llama with a byte-level tokenizer: as arrays, as a checkpoint, and as a GGUF file."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, CONTEXT = 128, 256, 2, 4, 2, 256  # wide enough for blocks of 64 weights
BOS, EOS = "<s>", "</s>"
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"))
SPREAD = 0.2  # of the weights: distributions that are far from flat

Weights = dict[str, NDArray[np.float32]]


@cache
def tokens() -> tuple[str, ...]:
    """The vocabulary in order: two control tokens, a character for each byte, and what the merges make."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return (BOS, EOS, *(characters[byte] for byte in range(256)), *("".join(merge) for merge in MERGES))


@cache
def weights() -> Weights:
    """The tensors by the names that transformers gives them."""
    random = np.random.default_rng(0)
    head = HIDDEN // HEADS
    shapes = {"model.embed_tokens": (len(tokens()), HIDDEN), "lm_head": (len(tokens()), HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in ("q", "o")}
        shapes |= {f"{at}.self_attn.{name}_proj": (KV_HEADS * head, HIDDEN) for name in ("k", "v")}
        shapes |= {f"{at}.mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj"] = (HIDDEN, INNER)
    norms = ["model.norm"]
    norms += [f"model.layers.{n}.{name}_layernorm" for n in range(LAYERS) for name in ("input", "post_attention")]
    found = {f"{name}.weight": random.normal(0, SPREAD, shape).astype(np.float32) for name, shape in shapes.items()}
    return found | {f"{name}.weight": np.ones(HIDDEN, np.float32) for name in norms}


def checkpoint(place: Path) -> Path:
    """The model as a checkpoint folder, made where it is not there yet."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = place / "checkpoint"
    if not folder.exists():
        config = LlamaConfig(
            vocab_size=len(tokens()),
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            max_position_embeddings=CONTEXT,
            bos_token_id=0,
            eos_token_id=1,
        )
        model = LlamaForCausalLM(config).eval()
        model.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in weights().items()})
        model.save_pretrained(folder)
        save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """Write the tokenizer's files beside a checkpoint."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate(tokens())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS).save_pretrained(folder)


def gguf_file(place: Path, *, quantized: bool) -> Path:
    """The model as a GGUF file, its linear layers in Q8_0 blocks or in float32."""
    import gguf

    path = place / f"tiny-{'q8_0' if quantized else 'f32'}.gguf"
    out = gguf.GGUFWriter(path, "llama")
    out.add_name("tiny")
    out.add_context_length(CONTEXT)
    out.add_embedding_length(HIDDEN)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(INNER)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_rope_dimension_count(HIDDEN // HEADS)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_vocab_size(len(tokens()))
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list(list(tokens()))
    kinds = gguf.TokenType
    out.add_token_types([int(kinds.CONTROL if token in (BOS, EOS) else kinds.NORMAL) for token in tokens()])
    out.add_token_merges([" ".join(merge) for merge in MERGES])
    out.add_bos_token_id(0)
    out.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    kind: Any = gguf.GGMLQuantizationType.Q8_0
    for key, value in weights().items():
        name = f"{names.get_name(key.removesuffix('.weight'))}.weight"
        rotary = key.endswith(("q_proj.weight", "k_proj.weight"))
        rows = _rotary_order(value, HEADS if "q_proj" in key else KV_HEADS) if rotary else value
        if quantized and "_proj" in key:
            out.add_tensor(name, gguf.quants.quantize(rows, kind), raw_dtype=kind)
        else:
            out.add_tensor(name, rows)
    for write in (out.write_header_to_file, out.write_kv_data_to_file, out.write_tensors_to_file, out.close):
        write()
    return path


def _rotary_order(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp's order of rotary rows, which readers of its files undo."""
    half = weight.shape[0] // heads // 2
    return np.ascontiguousarray(weight.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape))
