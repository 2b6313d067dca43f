"""The published sweep's own candidates: GGUF types by llama.cpp's quantizer, and a page without paths."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import gguf
import pytest

from tests.evalgate.sample_sweep import board
from tests.gguf_files import write_llama
from tests.serve.architectures import built
from tests.serve.tiny_models import byte_level

FILE = Path(__file__).parents[1] / "reports" / "make_sweep.py"


@pytest.fixture(scope="module")
def made() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_sweep", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_matrix_of_a_file_is_requantized(made: ModuleType, tmp_path: Path) -> None:
    source = write_llama(built("llama"), byte_level(bos=True), tmp_path / "plain.gguf")
    made.requantize(source, tmp_path / "small.gguf", "Q4_0")
    reader = gguf.GGUFReader(tmp_path / "small.gguf")
    found = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    before = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    assert set(found) == set(before) and found["token_embd.weight"] == made.HEAD
    assert {found[name] for name, tensor in before.items() if len(tensor.shape) == 1} == {"F32"}
    assert found["blk.0.attn_q.weight"] == "Q4_0"
    assert found["blk.0.ffn_down.weight"] == "F16"  # rows of 48 are not whole blocks of anything


def test_page_names_no_path(made: ModuleType) -> None:
    sample = board()
    paths = {entry.name: f"/somewhere/{entry.name}.gguf" for entry in sample.entries}
    placed = [entry.model_copy(update={"spec": paths[entry.name], "run": "runs/x"}) for entry in sample.entries]
    noted = sample.model_copy(update={"entries": placed, "notes": [f"{paths['Q8_0']} tokenizes differently"]})
    public = made._named_as_made(noted)
    page = made.page(public)
    assert "/somewhere" not in page + public.model_dump_json()
    assert public.notes == ["demo as Q8_0 tokenizes differently"]
    assert page.startswith("# The sweep\n") and "](sweep.svg)" in page and "| `" in page
