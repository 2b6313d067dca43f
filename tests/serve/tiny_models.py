"""Tiny random models and tokenizers for tests: built in milliseconds, saved like real checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

TEXT = ["hello world, hello there. the quick brown fox", "user says hello; assistant says hi\n", "wörld 日本 🙂"] * 3
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(*, bos: bool = False, template: str | None = CHATML, trim: bool = True) -> PreTrainedTokenizerFast:
    """A GPT-2-like byte-level BPE with ChatML control tokens; with `bos`, a post-processor adds <s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=trim)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=299,
            special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens(["<think>"])  # added, but not special
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>")
    fast.chat_template = template
    return fast


def unmerged(fast: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same vocabulary without its merges: text comes apart into its bytes."""
    parsed = json.loads(fast.backend_tokenizer.to_str())
    parsed["model"]["merges"] = []
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(parsed)), bos_token="<s>", eos_token="<|im_end|>"
    )
    other.chat_template = fast.chat_template
    return other


def metaspace(*, first: bool = True) -> PreTrainedTokenizerFast:
    """A Llama-2-like BPE: a "▁" before the text (`first`), byte fallback, <s> added."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    scheme = "first" if first else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    tokenizer.normalizer = normalizers.NFC()
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer.train_from_iterator(
        TEXT[:2],
        trainers.BpeTrainer(
            vocab_size=380, special_tokens=["<unk>", "<s>", "</s>", "[INST]", *fallback], show_progress=False
        ),
    )
    parsed = json.loads(tokenizer.to_str())  # the trainer marks bytes as added tokens; real vocabularies do not
    parsed["added_tokens"] = [entry for entry in parsed["added_tokens"] if entry["content"] not in set(fallback)]
    ours = Tokenizer.from_str(json.dumps(parsed))
    ours.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    ours.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=ours, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = (
        "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [INST]"
        "{% else %} {{ m.content | trim }} </s>{% endif %}{% endfor %}"
    )
    return fast


def stripping() -> PreTrainedTokenizerFast:
    """ChatML control tokens that swallow the whitespace around them (rstrip), as Phi-3's do."""
    fast = byte_level()
    fast.add_special_tokens({"additional_special_tokens": [AddedToken("<|im_end|>", rstrip=True, special=True)]})
    return fast


def llama(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=304, num_key_value_heads=2, max_position_embeddings=64, **sizes, **options)
    return LlamaForCausalLM(config).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=48)
    return GPT2LMHeadModel(config).eval()


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=64,
    )
    return MixtralForCausalLM(config).eval()


def save(model: Any, folder: Path, tokenizer: Any | None = None) -> Path:
    model.save_pretrained(folder)
    (tokenizer or byte_level()).save_pretrained(folder)
    return folder
