"""What-if conversions: each format against the arithmetic of its own definition, and recipes that mix them."""

from __future__ import annotations

import copy
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from serve.config import ModelSpec, Recipe
from serve.errors import LoadFailed
from serve.models.conversions import convert, find
from serve.models.conversions._blocks import packed, unpacked
from serve.models.conversions._rounding import names
from serve.models.conversions._weights import places
from serve.selftest import tiny as wide
from serve.wire import conversions, known_conversion, split_spec
from tests.serve import tiny_models as tiny

ROWS = torch.randn(6, 256, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    """Rows of 128 and 256 weights in float32."""
    from transformers import AutoModelForCausalLM

    folder = wide.checkpoint(tmp_path_factory.mktemp("wide"))
    loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return loaded


def weight(model: torch.nn.Module, path: str) -> torch.Tensor:
    found: torch.Tensor = model.get_submodule(path).weight.detach()
    return found


@pytest.mark.parametrize(("name", "bits", "group"), [("int4", 4, 256), ("int4-g32", 4, 32), ("int3-g128", 3, 128)])
def test_integers_are_what_compressed_tensors_defines(name: str, bits: int, group: int) -> None:
    """The scale is absmax / (2^b - 1) * 2, the grid runs from -2^(b-1) to 2^(b-1) - 1: group by group in float64."""
    pytest.importorskip("compressed_tensors", reason="needs the 'quant' extra")
    values = ROWS.double().numpy().reshape(-1, group)
    scale = np.abs(values).max(axis=1, keepdims=True) / ((2**bits - 1) / 2)
    wanted = np.clip(np.rint(values / scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scale
    got = find(name).round_rows(ROWS).double().numpy().reshape(-1, group)
    off, steps = np.abs(got - wanted), values / scale
    tied = np.abs(np.abs(steps - np.floor(steps)) - 0.5) < 1e-4  # a group's largest value is midway between two steps
    assert off[~tied].max() < 1e-5 and (off <= scale * 1.001).all()


@pytest.mark.parametrize("name", sorted(set(conversions()) - {"bf16", "f16", "f32", "dequantized", "merged"}))
def test_every_rounding_repeats_keeps_zeros_and_has_the_error_of_its_bits(name: str) -> None:
    pytest.importorskip("compressed_tensors", reason="needs the 'quant' extra")
    pytest.importorskip("bitsandbytes", reason="needs the 'quant' extra")
    conversion = find(name)
    rows = ROWS.clone()
    rows[2] = 0
    first = conversion.round_rows(rows)
    assert torch.equal(first, conversion.round_rows(rows)) and first.shape == rows.shape
    assert torch.isfinite(first).all() and not first[2].any()
    error = float((first - rows).norm() / rows.norm())
    bits = 8 * sum(conversion.size(6, 256).values()) / rows.numel()
    assert 2**-bits / 8 < error < 2 ** (2 - bits) + 0.02, (error, bits)  # within what so many bits can do


@pytest.mark.parametrize(("kind", "error"), [("Q8_0", 0.01), ("Q4_0", 0.11), ("IQ4_NL", 0.1), ("Q2_K", 0.4)])
def test_blocks_are_what_gguf_reads(kind: str, error: float) -> None:
    """Root mean square errors of normal weights; where gguf can write a type itself, the same blocks."""
    values = np.random.default_rng(0).normal(size=(2, 3, 512)).astype(np.float32)
    blocks = packed(values, kind)
    number = gguf.GGMLQuantizationType[kind]
    back = gguf.dequantize(blocks.reshape(6, -1), number).reshape(values.shape)
    assert np.sqrt(((back - values) ** 2).mean()) < error
    if kind == "Q8_0":
        assert np.array_equal(blocks.reshape(6, -1), gguf.quantize(values.reshape(6, 512), number))


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_llama_cpp_and_gguf_pack_the_same_bytes(type_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from serve.models.conversions import _blocks

    rows = ROWS.numpy()
    ours = packed(rows, type_name)
    monkeypatch.setattr(_blocks, "_llama_cpp", lambda: None)
    np.testing.assert_array_equal(ours, packed(rows, type_name))
    assert unpacked(ours, type_name).shape == rows.shape


def test_what_only_llama_cpp_packs_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from serve.models.conversions import _blocks

    monkeypatch.setattr(_blocks, "_llama_cpp", lambda: None)
    with pytest.raises(LoadFailed, match=r"Q4_K needs llama.cpp's quantizer: pip install"):
        find("q4_k").round_rows(ROWS)


@pytest.mark.parametrize(
    ("name", "package"), [("int4", "compressed-tensors"), ("nf4", "bitsandbytes"), ("q8_0", "gguf")]
)
def test_a_missing_library_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = {"int4": "_compressed", "nf4": "_bitsandbytes", "q8_0": "_blocks"}[name]

    def absent(wanted: str) -> None:
        raise ImportError(wanted)

    monkeypatch.setattr(f"serve.models.conversions.{module}.import_module", absent)
    if name == "q8_0":
        from serve.models.conversions import _blocks

        monkeypatch.setattr(_blocks, "_sizes", _blocks._sizes.__wrapped__)
    with pytest.raises(LoadFailed, match=f"{package}.*pip install"):
        find(name).round_rows(ROWS)


def test_rows_that_are_not_whole_blocks_fall_back_and_say_so(model: torch.nn.Module) -> None:
    """As llama.cpp does it: Q6_K has blocks of 256, so rows of 128 are in Q8_0."""
    converted, scheme = convert(model, "q6_k", name="m")
    assert "12 of 14 layers in Q8_0, for their rows are not whole blocks of q6_k" in scheme
    for path, chosen in (("model.layers.0.self_attn.q_proj", "q8_0"), ("model.layers.1.mlp.down_proj", "q6_k")):
        assert torch.equal(weight(converted, path), find(chosen).round_rows(weight(model, path)))
    types, _ = find("q6_k").stored(converted, name="m")
    assert set(types) == {"Q6_K", "Q8_0", "BF16"}


def test_a_recipe_gives_each_layer_its_own_conversion(model: torch.nn.Module) -> None:
    """The last pattern that names a layer decides; the head is rounded only where it is named; all else is shared."""
    pytest.importorskip("compressed_tensors", reason="needs the 'quant' extra")
    before = copy.deepcopy(model.state_dict())
    text = "int4-g32{mlp=int8,layers.0=bf16,layers.0.*.down_proj=q6_k,lm_head=q8_0}"
    converted, scheme = convert(model, text, name="m")
    assert scheme.startswith(f"{text}: weights rounded layer by layer, computed in float32")
    for path, chosen in {
        "model.layers.1.self_attn.q_proj": "int4-g32",
        "model.layers.1.mlp.up_proj": "int8",
        "model.layers.0.mlp.up_proj": "bf16",
        "model.layers.0.self_attn.k_proj": "bf16",
        "model.layers.0.mlp.down_proj": "q6_k",
        "lm_head": "q8_0",
    }.items():
        assert torch.equal(weight(converted, path), find(chosen).round_rows(weight(model, path))), path
    assert converted.model.embed_tokens.weight is model.model.embed_tokens.weight
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    types, counted = find(text).stored(converted, name="m")
    assert {"I4", "I8", "Q6_K", "Q8_0", "BF16"} <= set(types) and "recipe" in counted


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("int8{nothing=bf16}", r"the pattern 'nothing' matches no layer; layers are called like model\.layers\.0"),
        ("int8{layers.7=bf16}", r"the pattern 'layers.7' matches no layer"),
        ("int8{mlp=bf16,layers=int8}", r"'mlp=bf16' decides no layer, since later patterns match all of its"),
        ("bf16-g32", "@bf16 takes no group size"),
        ("q4_0-g64", "@q4_0 takes no group size"),
        ("nf4-g48", "@nf4 has blocks of 32, 64"),
        ("nvfp4-g32", "@nvfp4 has blocks of 16 weights by definition"),
        ("int8-g100", r"layer model\.layers\.0\.self_attn\.q_proj: rows of 128 weights are not whole groups of 100"),
    ],
)
def test_what_a_recipe_cannot_mean_is_refused(model: torch.nn.Module, text: str, says: str) -> None:
    with pytest.raises(LoadFailed, match=says):
        convert(model, text, name="m")


@pytest.mark.parametrize(
    ("pattern", "path", "named"),
    [
        ("mlp", "model.layers.3.mlp.up_proj", True),
        ("layers.1", "model.layers.11.mlp.up_proj", False),
        ("layers.1", "model.layers.1.mlp.up_proj", True),
        ("layers.1?", "model.layers.11.mlp.up_proj", True),
        ("*_proj", "model.layers.0.mlp.up_proj", True),
        ("up", "model.layers.0.mlp.up_proj", False),
        ("layers.*.mlp", "model.layers.0.mlp.up_proj", True),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj", False),
    ],
)
def test_patterns_name_whole_parts(pattern: str, path: str, named: bool) -> None:
    assert names(pattern, path) is named


def test_places_of_other_layouts() -> None:
    """GPT-2's Conv1D is [in, out], fused experts have a row for each expert's output, and a tied head is one place."""
    found = {path: place for place in places(tiny.gpt2(), conversion="int8", name="m") for path in place.paths}
    fc = found["transformer.h.0.mlp.c_fc"]
    assert (fc.rows, fc.columns) == (128, 32) and torch.equal(fc.from_rows(fc.as_rows()), fc.weight)
    assert found["lm_head"] is found["transformer.wte"] and found["lm_head"].end
    experts = {path: place for place in places(tiny.mixtral(), conversion="int8", name="m") for path in place.paths}
    fused = next(place for path, place in experts.items() if path.endswith("experts.gate_up_proj"))
    assert fused.weight.ndim == 3 and torch.equal(fused.from_rows(fused.as_rows()), fused.weight)
    tied, _ = convert(tiny.gpt2(), "int8{lm_head=int8}", name="m")
    assert tied.lm_head.weight is tied.transformer.wte.weight


def test_a_recipe_file_is_the_same_conversion_as_its_text(tmp_path: Path) -> None:
    file = tmp_path / "my recipe.toml"
    file.write_text('base = "int4-g128"\n[layers]\nmlp = "int8"\n"layers.0" = "bf16"\n')
    spec = ModelSpec.parse(f"some model@{file}")
    assert spec.source == "some model" and str(spec) == f"some model@{file}"
    recipe = spec.recipe()
    assert recipe == Recipe.parse("int4-g128{mlp=int8, layers.0=bf16}")
    assert str(recipe) == "int4-g128{mlp=int8,layers.0=bf16}"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("base =", "is not TOML"),
        ("layers = 3", "lacks its base"),
        ('base = "int4"\nlayer = 3', "has the key 'layer'"),
        ('base = "int4"\n[layers]\nlayers.0 = "int8"', "put patterns with dots in quotes"),
        ('base = "int9"', "unknown conversion '@int9'"),
        ('base = "int4"\n[layers]\nmlp = "int9"', "unknown conversion '@int9'"),
    ],
)
def test_a_recipe_file_that_cannot_be_read_says_why(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "r.toml").write_text(content)
    with pytest.raises(LoadFailed, match=says) as caught:
        ModelSpec.parse(f"m@{tmp_path / 'r.toml'}")
    assert "\n" not in caught.value.message
    with pytest.raises(LoadFailed, match="cannot be read"):
        ModelSpec.parse(f"m@{tmp_path / 'nowhere.toml'}")


def test_specs(tmp_path: Path) -> None:
    assert split_spec("a@b@int4-g128{x=y}") == ("a@b", "int4-g128{x=y}")
    assert split_spec("user@host/model") == ("user@host/model", "")
    assert split_spec("./a.b@r.toml") == ("./a.b", "r.toml")
    assert known_conversion("int4-g128") and not known_conversion("int4-g0") and not known_conversion("int4-g")
    (tmp_path / "model@int8").mkdir()
    assert ModelSpec.parse(str(tmp_path / "model@int8")) == ModelSpec(str(tmp_path / "model@int8"))
    for text, says in (
        ("m@int4{mlp}", "'mlp' in 'int4{mlp}' is not PATTERN=CONVERSION"),
        ("m@int4{mlp=int8,}", "'' in "),
        ("m@int4{}", "is not PATTERN=CONVERSION"),
        ("m@int4{mlp=int11}", "unknown conversion '@int11'"),
        ("m@int4@int8{mlp=int4}", "names @int4 and @int8"),
    ):
        with pytest.raises(LoadFailed, match=says):
            ModelSpec.parse(text)
