"""How large weights are, against the sizes of their files and tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from serve.config import ModelSpec
from serve.models import room, weights
from serve.models.load import Failures, load_models
from serve.models.source import Source
from tests.checkpoints import pair
from tests.gguf_files import write_llama
from tests.serve.architectures import built
from tests.serve.tiny_models import byte_level


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    pair(folder)
    write_llama(built("llama"), byte_level(bos=True), folder / "mixed.gguf", q8_0="gate_proj")
    return folder


@pytest.fixture(autouse=True)
def own_cache(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALGATE_CACHE", str(place / "cache"))


def load(*specs: str, failures: Failures | None = None) -> dict[str, weights.Weights | None]:
    found = load_models([ModelSpec.parse(spec) for spec in specs], device="cpu", failures=failures)
    return {model.name: model.weights for model in found}


def test_files_and_conversions(place: Path) -> None:
    """A checkpoint is as large as its tensors; a conversion as large as its format, and nothing else changes."""
    ref = str(place / "ref")
    found = load(ref, f"{ref}@bf16", f"{ref}@int8")
    model = built("llama")
    parameters = sum(p.numel() for p in model.parameters())
    linear = [m.weight for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    inside, channels = sum(w.numel() for w in linear), sum(w.shape[0] for w in linear)
    sizes = {name.removeprefix(ref): size for name, size in found.items()}
    plain, bf16, int8 = (sizes[end] for end in ("", "@bf16", "@int8"))
    assert plain is not None and bf16 is not None and int8 is not None
    assert plain.parameters == bf16.parameters == int8.parameters == parameters
    assert plain.counted == weights.IN_SAFETENSORS and plain.types == {"F32": 4 * parameters}
    assert plain.bits == 32 and bf16.bits == 16
    assert int8.bytes == inside + 4 * channels + 2 * (parameters - inside)
    assert "8 bits" in int8.counted and next(iter(int8.types)) in ("I8", "BF16")


def test_gguf_is_counted_by_type(place: Path) -> None:
    """The tensors of the file by type: as gguf's own reader has them, without the header."""
    import gguf

    reader = gguf.GGUFReader(place / "mixed.gguf")
    expected: dict[str, int] = {}
    for tensor in reader.tensors:
        kind = tensor.tensor_type.name
        expected[kind] = expected.get(kind, 0) + int(tensor.n_bytes)
    (found,) = load(str(place / "mixed.gguf")).values()
    assert found is not None
    assert dict(found.types) == expected and set(expected) == {"F32", "Q8_0"}
    assert found.bytes == sum(expected.values()) < (place / "mixed.gguf").stat().st_size
    assert weights.gguf_elements(place / "mixed.gguf") == sum(int(t.n_elements) for t in reader.tensors)


def test_packed_weights_count_as_many_as_they_stand_for(place: Path, tmp_path: Path) -> None:
    """The parameters of a quantized model are those of its architecture, whatever its packed tensors' shapes are."""
    model = built("llama")
    plain = weights.parameters_of(model, quantized=False)
    model.config.quantization_config = {"quant_method": "anything"}
    try:
        assert weights.parameters_of(model, quantized=True) == plain
    finally:
        del model.config.quantization_config


@pytest.mark.parametrize("keep", [0, 3, 20, 200])
def test_a_cut_file_has_no_size(place: Path, tmp_path: Path, keep: int) -> None:
    """Headers that end too early, or say nonsense, give no size instead of an error."""
    for source, name in (("mixed.gguf", "cut.gguf"), ("ref/model.safetensors", "cut.safetensors")):
        (tmp_path / name).write_bytes((place / source).read_bytes()[:keep])
        assert weights.of_files([tmp_path / name], parameters=10) is None
    (tmp_path / "odd.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]")
    assert weights.of_files([tmp_path / "odd.safetensors"], parameters=10) is None


def test_other_files_count_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 123)
    found = weights.of_files([tmp_path / "pytorch_model.bin"], parameters=100)
    assert found is not None and found.bytes == 123 and found.counted == weights.IN_FILES


def test_what_cannot_be_loaded_is_left_out(place: Path) -> None:
    """Every model that loads is there, in order; the others have a reason each, one for a bad conversion alone."""
    ref, failures = str(place / "ref"), Failures()
    (place / "broken").mkdir(exist_ok=True)
    (place / "broken" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    wanted = [str(place / "broken"), f"{ref}@int8", "/nowhere.gguf", ref, "/nowhere.gguf@bf16"]
    assert list(load(*wanted, failures=failures)) == [f"{ref}@int8", ref]
    assert set(failures.reasons) == {str(place / "broken"), "/nowhere.gguf", "/nowhere.gguf@bf16"}
    assert "no weights" in failures.reasons[str(place / "broken")]
    assert failures.no_room == []


def test_what_does_not_fit_is_left_for_later(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would fit beside the first model, and does not once that is loaded, is no failure."""
    free = iter([1 << 40, 1])  # before anything is loaded, and beside the first model
    monkeypatch.setattr(room, "available", lambda device: next(free))
    failures = Failures()
    assert list(load(str(place / "ref"), str(place / "cand"), failures=failures)) == [str(place / "ref")]
    assert failures == Failures({}, [str(place / "cand")])


def test_room_needed_and_there(place: Path, tmp_path: Path) -> None:
    """The estimate is at least what the tensors take; a container's limit counts, its cached files do not."""
    size = sum(p.numel() for p in built("llama").parameters()) * 4
    ref = Source("ref", place / "ref", gguf=False)
    assert size <= room.needed(ref, [None], device="cpu") < room.needed(ref, [None, "bf16"], device="cpu") < 3 * size
    assert room.needed(Source("m", place / "mixed.gguf", gguf=True), [None], device="cpu") >= size
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("600\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 200\n")
    assert room._container(tmp_path) == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert room._container(tmp_path) is None
    free = room.available("cpu")
    assert free is None or free > 0


def test_sizes_are_remembered_by_content(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second load steps over no header; a note that is damaged or about other contents is no note."""
    file, cache = place / "mixed.gguf", place / "notes"
    facts = {"parameters": 7, "cache": cache}
    first = weights.remembered([file], digest="a", **facts)
    assert first is not None and first.types == weights.gguf_types(file)
    with monkeypatch.context() as patch:
        patch.setattr(weights, "of_files", lambda *_, **__: pytest.fail("read again"))
        assert weights.remembered([file], digest="a", **facts) == first
    note = cache / "sizes" / "a.json"
    for damaged in ("{", note.read_text().replace('"a"', '"b"'), note.read_text().replace('"types"', '"kinds"')):
        note.write_text(damaged)
        assert weights.remembered([file], digest="a", **facts) == first
    assert weights.remembered([place / "nowhere.gguf"], digest="c", **facts) is None
    assert not (cache / "sizes" / "c.json").exists()
