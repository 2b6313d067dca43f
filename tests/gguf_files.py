"""GGUF files for tests, written with the `gguf` package's own quantizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


def requantize(source: Path, target: Path, kind: str) -> Path:
    """Dequantize `source` to float32 and write it again with every matrix (the embedding included) as `kind`.

    Vectors (norms) stay float32.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    quantized = gguf.GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        if values.ndim > 1:
            writer.add_tensor(tensor.name, gguf.quantize(values, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def edit(
    source: Path, target: Path, *, fields: dict[str, object] | None = None, tensors: dict[str, np.ndarray] | None = None
) -> Path:
    """A copy of a float32 file with some metadata fields replaced or added, and further tensors."""
    reader = gguf.GGUFReader(source)
    changed = fields or {}
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", *changed):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for name, value in changed.items():
        kind = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING}
        writer.add_key_value(name, value, kind[type(value)])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    return target


def write_llama(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    target: Path,
    *,
    q8_0: str = "-",
    blocks: Mapping[str, tuple[str, np.ndarray]] | None = None,
) -> Path:
    """A Llama as GGUF: float32 tensors, those with `q8_0` in their name in Q8_0 blocks; control tokens come first.

    blocks: by key of the state dict, a type and the tensor packed in it. Ids that the model has and the tokenizer has
    not get names that fill up.
    """
    config = model.config
    out = gguf.GGUFWriter(target, "llama")
    out.add_name(target.stem)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_vocab_size(config.vocab_size)
    _add_tokenizer(out, tokenizer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        stem, suffix = key.rsplit(".", 1)
        weight = tensor.numpy()
        if "q_proj" in key or "k_proj" in key:
            weight = _permuted(weight, config.num_attention_heads if "q_proj" in key else config.num_key_value_heads)
        name = f"{names.get_name(stem)}.{suffix}"
        if blocks and key in blocks:
            type_name, made = blocks[key]
            out.add_tensor(name, made, raw_dtype=gguf.GGMLQuantizationType[type_name])
        elif q8_0 in key:
            kind = gguf.GGMLQuantizationType.Q8_0
            out.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
        else:
            out.add_tensor(name, weight)
    for write in (out.write_header_to_file, out.write_kv_data_to_file, out.write_tensors_to_file, out.close):
        write()
    return target


def _add_tokenizer(out: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> None:
    tokens = [tokenizer.convert_ids_to_tokens(i) for i in range(len(tokenizer))]
    named = len(tokens)
    tokens += [f"[PAD{i}]" for i in range(named, vocab_size)]  # as llama.cpp's converter names them
    control = set(tokenizer.all_special_tokens) | {"<|im_start|>"}
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list(tokens)
    kinds = gguf.TokenType
    types = [kinds.CONTROL if token in control else kinds.NORMAL for token in tokens[:named]]
    out.add_token_types([int(kind) for kind in types + [kinds.UNUSED] * (vocab_size - named)])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    out.add_token_merges([" ".join(merge) for merge in merges])
    out.add_bos_token_id(tokenizer.bos_token_id)
    out.add_eos_token_id(tokenizer.eos_token_id)


def _permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of rotary rows, which transformers undoes on load."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)
