from __future__ import annotations

import copy
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve.config import ModelSpec
from serve.errors import LoadFailed
from serve.models import hashing
from serve.models.body import body_of
from serve.models.load import NO_LIMIT, LoadedModel, describe, load_models
from serve.models.scheme import load_mode
from tests.serve import tiny_models as tiny


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.save(tiny.llama(), tmp_path / "ckpt")


def load(*specs: object, **options: Any) -> list[LoadedModel]:
    return load_models([ModelSpec.parse(str(spec)) for spec in specs], device="cpu", **options)


def edit(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    path.unlink()  # the tensors may be mapped from it
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_folder_with_its_facts(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (model,) = load(folder)
    assert (model.vocab_size, model.context_length, model.dtype, model.compute_dtype) == (304, 64, "float32", "float32")
    assert (model.load_mode, model.scheme, model.name) == ("as stored", "", str(folder))
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        assert torch.equal(model.model(ids).logits, tiny.llama()(ids).logits)
    assert not model.model.training and not any(p.requires_grad for p in model.model.parameters())
    assert len(model.tokenizer) == len(tiny.byte_level())
    captured = capfd.readouterr()
    assert captured.out == "" == captured.err


def test_specs_of_one_source_are_read_once_and_share(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    reads = []
    original = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: reads.append(a) or original(*a, **k))
    base, int8, bf16 = load(folder, f"{folder}@int8", f"{folder}@bf16")
    assert len(reads) == 1
    assert int8.model.lm_head.weight is base.model.lm_head.weight
    assert int8.model.model.embed_tokens.weight is base.model.model.embed_tokens.weight
    assert not torch.equal(int8.model.model.layers[0].mlp.up_proj.weight, base.model.model.layers[0].mlp.up_proj.weight)
    assert (bf16.dtype, int8.dtype) == ("bfloat16", "float32")
    assert len({m.weights_hash for m in (base, int8, bf16)}) == 3
    assert len({m.tokenizer_hash for m in (base, int8, bf16)}) == 1
    assert "per-output-channel" in int8.scheme and "bfloat16" in bf16.scheme


def test_order_is_kept_and_length_capped(folder: Path, tmp_path: Path) -> None:
    other = tiny.save(tiny.gpt2(), tmp_path / "gpt2")
    models = load(folder, other, f"{folder}@bf16", max_model_len=50)
    assert [m.name for m in models] == [str(folder), str(other), f"{folder}@bf16"]
    assert [m.context_length for m in models] == [50, 48, 50]


def test_a_checkpoint_in_bfloat16_computes_in_float32_on_cpu(tmp_path: Path) -> None:
    (model,) = load(tiny.save(tiny.llama().bfloat16(), tmp_path / "b"))
    assert model.compute_dtype == "float32"


def test_missing_mismatched_and_left_over_weights_are_refused(folder: Path) -> None:
    key = "model.layers.1.mlp.up_proj.weight"
    saved = load_file(folder / "model.safetensors")[key].clone()
    edit(folder, lambda t: t.pop(key))
    with pytest.raises(LoadFailed, match=rf"lacks {key}"):
        load(folder)
    edit(folder, lambda t: t.update({key: torch.ones(3, 4)}))
    with pytest.raises(LoadFailed, match=rf"{key} \[3, 4\] for \[48, 32\]"):
        load(folder)
    edit(folder, lambda t: t.update({key: saved, "model.layers.0.mlp.weight_scale": torch.ones(1)}))
    with pytest.raises(LoadFailed, match=r"does not use: model.layers.0.mlp.weight_scale"):
        load(folder)


def test_many_missing_keys_are_counted(folder: Path) -> None:
    edit(folder, lambda t: [t.pop(key) for key in list(t) if "up_proj" in key or "norm" in key])
    with pytest.raises(LoadFailed, match=r"and 4 more \(7 in all\)"):
        load(folder)


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    folder = tiny.save(tiny.llama(tie_word_embeddings=True), tmp_path / "tied")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    (model,) = load(folder)
    assert model.model.lm_head.weight is model.model.model.embed_tokens.weight


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_named(folder: Path, value: float) -> None:
    key = "model.layers.0.self_attn.q_proj.weight"
    edit(folder, lambda t: t[key].view(-1).__setitem__(17, value))
    with pytest.raises(LoadFailed, match=f"NaN or infinity in '{key}'"):
        load(folder)


def test_a_conversion_that_overflows_is_named(folder: Path) -> None:
    edit(folder, lambda t: t["lm_head.weight"].view(-1).__setitem__(3, 1e6))
    load(folder)
    with pytest.raises(LoadFailed, match=r"@f16' has NaN or infinity in 'lm_head.weight'"):
        load(f"{folder}@f16")


def test_sources_that_cannot_be_found(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for source, words in {
        tmp_path / "nowhere": "does not exist",
        tmp_path / "nowhere.gguf": "does not exist",
        folder / "config.json": "not GGUF",
        tmp_path: "no config.json",
        "org/a..b": "nor a hub id",
    }.items():
        with pytest.raises(LoadFailed, match=words):
            load(source)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(LoadFailed, match="adapter"):
        load(folder)
    (folder / "adapter_config.json").unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(LoadFailed, match="no weights"):
        load(folder)


def test_an_unreachable_hub_fails_fast_in_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def unreachable(self: object, repo: str, **options: float) -> None:
        assert options["timeout"] <= 10
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    with pytest.raises(LoadFailed, match=r"neither a folder here nor in the Hugging Face cache.*cannot be reached"):
        load("no-such-org/no-such-model")


def test_a_cached_hub_id_needs_no_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, revision, local_files_only: str(folder))
    (model,) = load("org/name@bf16")
    assert model.name == "org/name@bf16" and model.dtype == "bfloat16"


def test_other_tasks_and_broken_configs(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for change, words in (
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a causal language model"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "not a causal language model"),
        ({"model_type": "no-such-type"}, "cannot be loaded"),
        ({"vocab_size": "many"}, "cannot be loaded"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(LoadFailed, match=words) as caught:
            load(folder)
        assert "\n" not in caught.value.message
    (folder / "config.json").write_text("{")
    with pytest.raises(LoadFailed, match="cannot be loaded"):
        load(folder)


def test_hashes_follow_content_not_names(folder: Path, tmp_path: Path, cache: Path) -> None:
    copy = tiny.save(tiny.llama(), tmp_path / "copy")
    first, second = load(folder)[0], load(copy)[0]
    assert first.weights_hash == second.weights_hash and first.tokenizer_hash == second.tokenizer_hash
    edit(copy, lambda t: t["lm_head.weight"].view(-1).__setitem__(0, 0.5))
    assert load(copy)[0].weights_hash != first.weights_hash
    assert hashing.tokenizer_hash(tiny.byte_level(trim=False)) != first.tokenizer_hash
    assert hashing.vocabulary_hash(tiny.byte_level(trim=False)) == first.vocabulary_hash
    assert hashing.vocabulary_hash(tiny.metaspace()) != first.vocabulary_hash


def test_other_merges_and_another_beginning_are_another_tokenizer_of_the_same_vocabulary() -> None:
    plain = tiny.byte_level()
    assert hashing.tokenizer_hash(tiny.byte_level()) == hashing.tokenizer_hash(plain)
    for other in (tiny.unmerged(plain), tiny.byte_level(bos=True)):
        assert hashing.vocabulary_hash(other) == hashing.vocabulary_hash(plain)
        assert hashing.tokenizer_hash(other) != hashing.tokenizer_hash(plain)
        assert other("hello world").input_ids != plain("hello world").input_ids


def test_file_hashes_are_remembered_while_the_file_is_the_same(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replaced file and a rewritten one, both with the old size and mtime, are hashed again."""
    path, settled = tmp_path / "w.bin", time.time_ns() - 60_000_000_000
    path.write_bytes(b"a" * 100)
    os.utime(path, ns=(settled, settled))
    assert hashing.cached_file_hash(path, cache=cache) == hashing.hash_file(path)
    assert not (cache / "hashes").exists()  # its inode was changed just now and may change again within one clock tick
    monkeypatch.setattr(hashing, "SETTLED", -1.0)
    first = hashing.cached_file_hash(path, cache=cache)
    with monkeypatch.context() as patch:
        patch.setattr(hashing, "hash_file", None)
        assert hashing.cached_file_hash(path, cache=cache) == first
    other = tmp_path / "other.bin"
    other.write_bytes(b"b" * 100)
    os.utime(other, ns=(settled, settled))
    other.rename(path)
    second = hashing.cached_file_hash(path, cache=cache)
    assert second == hashing.hash_file(path) != first
    time.sleep(0.05)  # a clock tick
    path.write_bytes(b"c" * 100)
    os.utime(path, ns=(settled, settled))
    assert hashing.cached_file_hash(path, cache=cache) == hashing.hash_file(path) != second
    for note in (cache / "hashes").iterdir():
        note.write_text("{")
    assert hashing.cached_file_hash(path, cache=cache) == hashing.hash_file(path)
    (tmp_path / "empty").touch()
    assert hashing.hash_file(tmp_path / "empty")


def test_describe_a_model_in_memory() -> None:
    loaded = describe(tiny.gpt2(), tiny.byte_level(), spec=ModelSpec("tiny"))
    assert (loaded.name, loaded.vocab_size, loaded.context_length, loaded.load_mode) == ("tiny", 300, 48, "in memory")
    other = tiny.gpt2()
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    assert describe(other, tiny.byte_level(), spec=ModelSpec("tiny")).weights_hash != loaded.weights_hash
    from transformers import BloomConfig, BloomForCausalLM

    odd = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2))
    assert describe(odd, tiny.byte_level(), spec=ModelSpec("tiny")).context_length == NO_LIMIT
    assert describe(odd, tiny.byte_level(), spec=ModelSpec("tiny"), max_model_len=9).context_length == 9


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (None, "as stored"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {
                "weights": {"num_bits": 8, "type": "float"},
                "input_activations": {"num_bits": 8, "type": "float", "dynamic": True}}}},
            "compressed-tensors FP8_DYNAMIC, as loaded",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {
                "weights": {"num_bits": 4, "type": "int"}, "input_activations": None}}},
            "compressed-tensors W4A16, as loaded",
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq bits=4 group_size=128, as loaded"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes int8, as loaded"),
    ],
)  # fmt: skip
def test_load_mode_in_words(stored: Any, words: str) -> None:
    model = tiny.llama()
    config = tiny.llama().config
    if stored is not None:
        config.quantization_config = model.config.quantization_config = stored
    assert load_mode(config, model) == words
    if stored is not None:
        del model.config.quantization_config
        assert load_mode(config, model) == words.replace("as loaded", "dequantized to float32 on load")


@pytest.mark.parametrize("length", [0, -5])
def test_a_context_of_no_tokens_is_refused(length: int) -> None:
    model = tiny.llama()
    model.config.max_position_embeddings = length
    with pytest.raises(LoadFailed, match=f"max_position_embeddings {length} in its config.json"):
        describe(model, tiny.byte_level(), spec=ModelSpec("tiny"))


def test_an_unknown_quantization_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny.save(tiny.llama(), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "no-such-method", "bits": 3}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadFailed, match="quantized with 'no-such-method', which this version"):
        load_models([ModelSpec(str(folder))], device="cpu")


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "a/../../b.safetensors"])
def test_a_weight_index_that_names_files_outside_its_folder_is_refused(tmp_path: Path, shard: str) -> None:
    folder = tiny.save(tiny.llama(), tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(LoadFailed, match="names a file outside its folder"):
        load_models([ModelSpec(str(folder))], device="cpu")


def test_a_text_model_whose_class_hides_its_body_is_found() -> None:
    """Llama 4's text model: `base_model` is the whole model."""
    from transformers import AutoModelForCausalLM, Llama4TextConfig

    from serve.engine.selfcheck import prepare
    from tests.serve.architectures import _SIZES, loaded

    sizes = {**_SIZES, "head_dim": 8, "intermediate_size_mlp": 48, "attention_chunk_size": 16}
    config = Llama4TextConfig(**sizes, num_local_experts=2, num_experts_per_tok=1)
    model = AutoModelForCausalLM.from_config(config).eval()
    assert body_of(model) is model.model
    assert prepare(loaded(model)).backend.startswith("padded (it ")


def test_soft_capping_is_kept_where_transformers_would_drop_it() -> None:
    from tests.serve.architectures import built, loaded

    model = copy.deepcopy(built("gemma2"))
    model.config._attn_implementation = "sdpa"  # as transformers 5.17 loads it
    assert loaded(model).model.config._attn_implementation == "eager"
    plain = copy.deepcopy(built("gemma3"))
    assert loaded(plain).model.config._attn_implementation == plain.config._attn_implementation
