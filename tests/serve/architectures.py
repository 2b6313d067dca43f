"""Tiny random models of many architectures, with weights large enough that their distributions are not flat."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers as t

from serve.config import EngineConfig, ModelSpec
from serve.engine.runtime import ModelRuntime
from serve.models.load import LoadedModel, describe
from tests.serve.tiny_models import byte_level

VOCABULARY = 320
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def _no_kv(**more: Any) -> dict[str, Any]:
    return {k: v for k, v in _SIZES.items() if k != "num_key_value_heads"} | more


def _small(config: Any) -> Any:
    torch.manual_seed(7)
    model = t.AutoModelForCausalLM.from_config(config)
    if getattr(config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # transformers 5.17 takes sdpa, which drops the cap
    return model.to(torch.float32).eval()


BUILDERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: _small(t.LlamaConfig(**_SIZES)),
    "qwen3": lambda: _small(t.Qwen3Config(**_SIZES, head_dim=16)),
    "gemma3": lambda: _small(
        t.Gemma3TextConfig(
            **_SIZES,
            head_dim=16,
            sliding_window=9,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            query_pre_attn_scalar=16,
        )
    ),
    "gpt2": lambda: _small(
        t.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=128, initializer_range=0.25)
    ),
    "mixtral": lambda: _small(
        t.MixtralConfig(**_SIZES | {"initializer_range": 0.15}, num_local_experts=4, num_experts_per_tok=2)
    ),
    "phi3": lambda: _small(t.Phi3Config(**_SIZES)),
    # structure beyond the six: sliding window everywhere, soft-capping, sinks, biases, parallel residual, scaled heads
    "mistral": lambda: _small(t.MistralConfig(**_SIZES, sliding_window=7)),
    "gemma2": lambda: _small(
        t.Gemma2Config(
            **_SIZES,
            head_dim=16,
            sliding_window=9,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            attn_logit_softcapping=5.0,
            final_logit_softcapping=8.0,
            query_pre_attn_scalar=16,
        )
    ),
    "gpt_oss": lambda: _small(
        t.GptOssConfig(
            **_SIZES | {"initializer_range": 0.15},
            head_dim=16,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    ),
    "gpt_neox": lambda: _small(t.GPTNeoXConfig(**_no_kv())),
    "opt": lambda: _small(
        t.OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=128,
            word_embed_proj_dim=16,
            init_std=0.25,
        )
    ),
    "cohere": lambda: _small(t.CohereConfig(**_SIZES, logit_scale=0.3)),
    "granite": lambda: _small(
        t.GraniteConfig(**_SIZES | {"initializer_range": 0.15}, logits_scaling=2.0, embedding_multiplier=3.0)
    ),
}
SIX = ("llama", "qwen3", "gemma3", "gpt2", "mixtral", "phi3")
PADDED: dict[str, Callable[[], Any]] = {
    "bloom": lambda: _small(
        t.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=3, n_head=4, initializer_range=0.25)
    ),
    "mamba": lambda: _small(
        t.MambaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            state_size=8,
            num_hidden_layers=3,
            initializer_range=0.25,
            pad_token_id=2,
            bos_token_id=0,
            eos_token_id=1,
        )
    ),
}


@functools.cache
def built(name: str) -> Any:
    """A model, built once; callers that change it take a copy."""
    return {**BUILDERS, **PADDED}[name]()


def perturbed(model: Any, *, by: float = 0.02) -> Any:
    """A copy with noise on every weight matrix: a candidate that differs a little everywhere."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.ndim > 1:
                parameter += by * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return other


def loaded(model: Any, name: str = "tiny") -> LoadedModel:
    """The model as the engine takes it."""
    return describe(model, byte_level(), spec=ModelSpec(name), max_model_len=128)


def runtime(model: Any, name: str = "tiny", *, kv_memory: int = 1 << 22, **sizes: Any) -> ModelRuntime:
    """A runtime over a copy, so that the cached model keeps its own attention."""
    return ModelRuntime(loaded(copy.deepcopy(model), name), EngineConfig(**sizes), kv_memory=kv_memory)


def tokens(n: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 300, (n,), generator=generator).tolist())


def own_logits(model: Any, ids: tuple[int, ...]) -> torch.Tensor:
    """[len(ids), vocabulary] float64 logits of the model's own eager forward on a float64 copy."""
    double = copy.deepcopy(model).double()
    double.set_attn_implementation("eager")
    if hasattr(double.config, "_experts_implementation"):
        double.set_experts_implementation("eager")  # the grouped kernel has no float64
    with torch.inference_mode():
        out: torch.Tensor = double(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return out.double()
