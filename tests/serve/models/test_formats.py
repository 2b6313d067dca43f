"""Checkpoints as people have them: what is read, what is refused until it is allowed, what is said of layers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve.config import ModelSpec, Reading
from serve.engine.selfcheck import prepare
from serve.errors import LoadFailed
from serve.models import layers
from serve.models.load import LoadedModel, load_models
from serve.models.source import resolve
from serve.models.tokenizerfiles import template_hash
from tests.gguf_files import write_llama
from tests.serve import tiny_models as tiny
from tests.serve.architectures import built
from tests.serve.architectures import loaded as in_memory

KEY = "model.layers.0.self_attn.q_proj"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.save(tiny.llama(), tmp_path / "a model + more")


def load(spec: object, **reading: Any) -> LoadedModel:
    (model,) = load_models([ModelSpec.parse(str(spec))], device="cpu", reading=Reading(**reading))
    return model


def config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def logits(model: LoadedModel) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.model(torch.arange(3, 20)[None]).logits
    return found


def adapter(folder: Path, base: Any, **options: Any) -> Path:
    """A LoRA adapter that changes what the base says."""
    peft = pytest.importorskip("peft", reason="needs the 'lora' extra")
    torch.manual_seed(1)
    settings = peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj", "up_proj"], **options}, init_lora_weights=False)
    with warnings.catch_warnings(action="ignore"):  # peft uses names that transformers renamed
        peft.get_peft_model(base, settings).save_pretrained(folder)
    return folder


def test_an_adapter_runs_beside_the_weights_or_in_them(folder: Path, tmp_path: Path) -> None:
    """Both say what peft's own model says; a conversion is of the merged weights; each is another model by its hash."""
    peft = pytest.importorskip("peft", reason="needs the 'lora' extra")
    lora = adapter(tmp_path / "my adapter", tiny.llama())
    spec = f"{folder}+{lora}"
    base, beside, merged, rounded = (load(s) for s in (folder, spec, f"{spec}@merged", f"{spec}@int8"))
    ids = torch.arange(3, 20)[None]
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        wanted = peft.PeftModel.from_pretrained(tiny.llama(), lora)(ids).logits
    assert not torch.allclose(logits(base), wanted, atol=1e-3)
    torch.testing.assert_close(logits(beside), wanted)
    torch.testing.assert_close(logits(merged), wanted, atol=1e-5, rtol=1e-5)
    assert 1e-4 < float((logits(rounded) - wanted).abs().max()) < 0.1
    assert beside.load_mode == "as stored, with a lora rank 2 adapter beside its weights"
    assert merged.load_mode == "as stored, with a lora rank 2 adapter merged into its weights"
    assert len({model.weights_hash for model in (base, beside, merged, rounded)}) == 4
    assert prepare(beside).backend == "packed"


def test_an_adapter_that_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    lora = adapter(tmp_path / "lora", tiny.llama())
    file = lora / "adapter_model.safetensors"
    tensors = load_file(file)
    whole = {key: tensor.clone() for key, tensor in tensors.items()}
    first = sorted(whole)[0]
    for change, says in (
        (lambda t: t.pop(first), "the adapter lacks"),
        (lambda t: t.update({first.replace("layers.0", "layers.9"): t[first].clone()}), "does not use"),
        (lambda t: t[first].view(-1).__setitem__(0, float("nan")), "NaN or infinity in the adapter"),
    ):
        damaged = {key: tensor.clone() for key, tensor in whole.items()}
        change(damaged)
        file.unlink()
        save_file(damaged, file)
        with pytest.raises(LoadFailed, match=says):
            load(f"{folder}+{lora}")
    other = adapter(tmp_path / "other", tiny.gpt2(), target_modules=["c_attn"])
    with pytest.raises(LoadFailed, match=r"layers that the base does not have \(c_attn\)"):
        load(f"{folder}+{other}")
    for spec, says in (
        (str(lora), "is an adapter: write BASE"),
        (f"{folder}+{tmp_path / 'nowhere'}", "does not exist: after \\+ stands"),
        (f"{folder}+{folder}", "has no adapter_config.json"),
        (f"{folder}@merged", "has no adapter to merge"),
    ):
        with pytest.raises(LoadFailed, match=says):
            load(spec)
    file.rename(file.with_name("adapter_model.bin"))
    with pytest.raises(LoadFailed, match=r"adapter_model.bin' is pickled.*--allow-pickle"):
        load(f"{folder}+{lora}")


def test_pickled_weights_are_read_only_where_that_is_allowed(folder: Path) -> None:
    wanted = logits(load(folder))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(LoadFailed, match=r"pickled weights \(pytorch_model.bin\).*--allow-pickle"):
        load(folder)
    assert torch.equal(logits(load(folder, allow_pickle=True)), wanted)


def test_code_that_a_checkpoint_brings_is_run_only_where_it_is_trusted(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "it ran"
    (folder / "configuration_own.py").write_text(
        "from transformers import LlamaConfig\n"
        f"open({str(marker)!r}, 'w').close()\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own-llama'\n"
    )
    (folder / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\n"
        "from .configuration_own import OwnConfig\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    brought = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    wanted = logits(load(folder))
    config(folder, model_type="own-llama", architectures=["OwnForCausalLM"], auto_map=brought)
    with pytest.raises(
        LoadFailed, match=r"brings its own code \(configuration_own.py, modeling_own.py\).*--trust-remot"
    ):
        load(folder)
    assert not marker.exists()
    assert torch.equal(logits(load(folder, trust_remote_code=True)), wanted) and marker.exists()


def test_shards_are_read_and_a_missing_one_is_named(folder: Path) -> None:
    wanted = logits(load(folder))
    tiny.llama().save_pretrained(folder, max_shard_size="40KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2 and torch.equal(logits(load(folder)), wanted)
    assert load(folder).weights is not None
    shards[1].unlink()
    with pytest.raises(LoadFailed, match=f"lacks the part {shards[1].name} that its index names"):
        load(folder)


def test_a_revision_is_of_the_hub(folder: Path) -> None:
    with pytest.raises(LoadFailed, match=r"--revision is for models of the hub, and '.*a model \+ more' is here"):
        resolve(str(folder), Reading(revision="main"))


@pytest.mark.parametrize("own", [True, False])
def test_a_head_that_is_tied_and_stored_besides(tmp_path: Path, own: bool) -> None:
    """One that is the embedding's copy is harmless; another one is a guess between two models."""
    folder = tiny.save(tiny.llama(tie_word_embeddings=True), tmp_path / "tied")
    tensors = {key: value.clone() for key, value in load_file(folder / "model.safetensors").items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * (1.5 if own else 1)
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if own:
        with pytest.raises(LoadFailed, match=r"head and its embedding are one.*lm_head.weight.*tie_word_embeddings"):
            load(folder)
    else:
        load(folder)


def test_a_head_of_its_own_that_is_missing_is_named(folder: Path) -> None:
    tensors = {key: value.clone() for key, value in load_file(folder / "model.safetensors").items()}
    del tensors["lm_head.weight"]
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadFailed, match=r"lacks lm_head.weight, which would be filled with random numbers"):
        load(folder)


def damaged(change: Callable[[Any], None]) -> LoadedModel:
    import copy

    model = copy.deepcopy(built("llama"))
    change(model)
    return in_memory(model)


def _noisy(model: Any) -> None:
    forward = model.forward

    def noisy(*args: Any, **options: Any) -> Any:
        out = forward(*args, **options)
        out.logits = out.logits + torch.randn_like(out.logits)
        return out

    model.forward = noisy


def _raising(model: Any) -> None:
    def forward(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no kernel for this processor")

    model.forward = forward


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda model: model.lm_head.weight.data.zero_(), "gives every token the same logit"),
        (lambda model: model.model.norm.weight.data.zero_(), "gives every token the same logit"),
        (lambda model: model.model.norm.weight.data.fill_(float("inf")), "non-finite logits on a probe"),
        (_noisy, "gives other logits when it is shown the same tokens again"),
        (_raising, r"cannot run a probe of a few tokens in float32 \(RuntimeError: no kernel for this processor\)"),
    ],
)
def test_a_model_that_no_figure_could_be_of_is_refused(change: Callable[[Any], None], says: str) -> None:
    with pytest.raises(LoadFailed, match=says) as caught:
        prepare(damaged(change))
    assert "\n" not in caught.value.message


def test_layers_of_a_checkpoint_and_of_its_conversion(folder: Path) -> None:
    plain, rounded = load(folder), load(f"{folder}@int8{{layers.0.mlp=q8_0}}".replace("q8_0", "bf16"))
    rows = {row.kind: row for row in plain.layers}
    assert rows["mlp.up_proj"] == layers.LayerKind("mlp.up_proj", 2, 2 * 48 * 32, 8 * 48 * 32, "F32")
    assert rows["norms"].layers == 5 and set(rows) >= {"embed_tokens", "lm_head", "self_attn.q_proj"}
    assert plain.weights is not None and sum(row.bytes for row in plain.layers) == plain.weights.bytes
    assert sum(row.parameters for row in plain.layers) == plain.weights.parameters
    up = {row.scheme: row for row in rounded.layers if row.kind == "mlp.up_proj"}
    assert set(up) == {"int8", "bf16"} and up["int8"].bytes == 48 * 32 + 4 * 48
    assert rounded.weights is not None and sum(row.bytes for row in rounded.layers) == rounded.weights.bytes
    assert plain.compute_reason.startswith("on a CPU") and plain.template_hash == template_hash(tiny.byte_level())
    assert template_hash(tiny.byte_level(template=None)) == "" != plain.template_hash


def test_layers_of_a_gguf_file(tmp_path: Path) -> None:
    file = write_llama(built("llama"), tiny.byte_level(bos=True), tmp_path / "m.gguf", q8_0="gate_proj")
    rows = {row.kind: row for row in load(file).layers}
    assert rows["ffn_gate"].scheme == "Q8_0" and rows["ffn_gate"].dequantized
    assert rows["ffn_up"].scheme == "F32" and not rows["ffn_up"].dequantized
    assert rows["norms"].scheme == "F32" and rows["norms"].layers >= 5


def test_fp8_loads_in_two_modes(tmp_path: Path) -> None:
    """As it is, activations are rounded too; unpacked, only the weights are, and the result says which."""
    pytest.importorskip("compressed_tensors", reason="needs the 'quant' extra")
    from serve.selftest import tiny as wide
    from serve.selftest.checks import write_fp8_dynamic

    source = wide.checkpoint(tmp_path)
    write_fp8_dynamic(source, tmp_path / "fp8")
    wide.save_tokenizer(tmp_path / "fp8")
    native, unpacked = load_models(
        [ModelSpec.parse(f"{tmp_path / 'fp8'}{end}") for end in ("", "@dequantized")], device="cpu"
    )
    ids = torch.arange(3, 20)[None]
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    weight = stored[f"{KEY}.weight"].float() * stored[f"{KEY}.weight_scale"]
    assert torch.allclose(unpacked.model.get_submodule(KEY).weight, weight, atol=1e-6)
    with torch.no_grad():
        assert float((native.model(ids).logits - unpacked.model(ids).logits).abs().max()) > 1e-3
    assert native.load_mode == "compressed-tensors FP8_DYNAMIC, as loaded"
    assert unpacked.load_mode == "compressed-tensors FP8_DYNAMIC, dequantized to float32 on load"
    assert native.weights_hash != unpacked.weights_hash
    mine = {row.kind: (row.scheme, row.activations, row.dequantized) for row in native.layers}
    assert mine["mlp.up_proj"] == ("FP8 a channel", "FP8 a token, dynamic", False)
    other = {row.kind: (row.activations, row.dequantized) for row in unpacked.layers}
    assert other["mlp.up_proj"] == ("", True) and other["lm_head"] == ("", False)


def test_what_has_nothing_to_unpack_is_refused(folder: Path) -> None:
    with pytest.raises(LoadFailed, match="has no packed weights: there is nothing to dequantize"):
        load(f"{folder}@dequantized")


@pytest.mark.parametrize(
    ("file", "library", "reading"),
    [("quanto_qmap.json", "optimum-quanto", {}), ("qmodel.pt", "hqq", {"allow_pickle": True})],
)
def test_a_library_that_is_not_installed_is_named(
    folder: Path, file: str, library: str, reading: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("serve.models.readers._base.import_module", absent)
    (folder / file).write_text("{}")
    with pytest.raises(LoadFailed, match=f"written by {library}, which is not installed: pip install {library}"):
        load(folder, **reading)
    if file.endswith(".pt"):
        with pytest.raises(LoadFailed, match=r"pickled weights \(qmodel.pt\)"):
            load(folder)


def test_formats_that_do_not_run_in_float32_are_run_in_what_they_do() -> None:
    from serve.models.checkpoint import compute_in

    for stored in (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        {"quant_method": "auto-round"},
    ):
        found = compute_in(stored, device="cpu", dtype=None)
        assert found.dtype == torch.bfloat16 and found.reason
        assert compute_in(stored, device="cpu", dtype=torch.float32).dtype == torch.float32
    assert compute_in({}, device="cpu", dtype=None).dtype == torch.float32
    assert compute_in({}, device="cuda", dtype=None).dtype == "auto"
