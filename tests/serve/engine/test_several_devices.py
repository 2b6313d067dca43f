"""A model over several devices, as far as a processor shows it: where layers go, and the packed runner through
hooks."""

from __future__ import annotations

import copy
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module

from serve.config import EngineConfig, ModelSpec
from serve.engine.pair import ScoreWindow, scored_rows
from serve.engine.runtime import ModelRuntime
from serve.errors import LoadFailed
from serve.models import conversions, room
from serve.models import load as loading
from tests.serve.architectures import built, loaded, tokens
from tests.serve.tiny_models import llama

WINDOWS = [ScoreWindow(tokens(n, seed=n), (1, n // 2, n - 1)) for n in (20, 40, 9)]


def split(model: Any) -> Any:
    """The model with accelerate's hooks on every part, as a model over several devices has them."""
    parts = [model.model.embed_tokens, model.model.rotary_emb, *model.model.layers, model.model.norm, model.lm_head]
    for part in parts:
        add_hook_to_module(part, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    return model


@pytest.mark.parametrize("conversion", [None, "int8"])
def test_the_packed_runner_runs_through_the_hooks(conversion: str | None) -> None:
    """Also those of a converted copy, which are its own."""
    plain, hooked = llama(), split(llama())
    if conversion is not None:
        plain, hooked = (conversions.convert(model, conversion, name="tiny")[0] for model in (plain, hooked))
    assert all(hasattr(layer, "_hf_hook") for layer in hooked.model.layers)
    rows = []
    for model in (plain, hooked):
        ours = ModelRuntime(loaded(model), EngineConfig(device="cpu", max_batch_tokens=64), kv_memory=16 << 20)
        assert ours.backend == "packed"
        with torch.inference_mode():
            rows.append(scored_rows(ours, WINDOWS))
    assert torch.equal(*rows)


def test_layers_are_not_split() -> None:
    """What transformers makes of the settings: whole layers, in order, each device as full as it may be."""
    with torch.device("meta"):
        model = copy.deepcopy(built("llama")).to("meta")
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    settings = room.device_map({0: size, 1: 1 << 30})
    assert settings["device_map"] == "auto" and settings["max_memory"][1] == int(0.8 * (1 << 30))
    found = accelerate.infer_auto_device_map(
        model, max_memory=settings["max_memory"], no_split_module_classes=model._no_split_modules
    )
    assert set(found.values()) == {0, 1}
    assert not any(".self_attn" in place or ".mlp" in place for place in found)
    room.check_placed(found, name="tiny")


def test_a_part_that_is_left_over_is_refused() -> None:
    with pytest.raises(LoadFailed, match=r"does not fit on the CUDA devices together .* on cpu and disk\): give --mem"):
        room.check_placed({"model.layers.0": 0, "model.layers.1": "cpu", "lm_head": "disk"}, name="big")


@pytest.mark.parametrize(("free", "device"), [(400, "cuda"), (90, room.SEVERAL), (30, None)])
def test_when_a_model_is_spread(free: int, device: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One device where it fits, several where it does not, and streamed where even those are too small."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 1000))
    monkeypatch.setattr(loading, "resolve", lambda *_: None)
    monkeypatch.setattr(room, "needed", lambda *_, **__: 100)
    seen: list[Any] = []

    def load(reader: Any, *_: Any, **__: Any) -> Any:
        seen.append(reader.device)
        return iter([])

    def streamed(*_: Any, limit: int, **__: Any) -> Any:
        seen.append(None)
        assert limit == int(0.8 * free)

    monkeypatch.setattr(loading, "_load_source", load)
    monkeypatch.setattr(loading, "_streamed", streamed)
    loading.load_models([ModelSpec("big")], device="auto")
    assert seen == [device]
