"""LoRA adapters: `BASE+ADAPTER` is a model with an adapter beside its weights, as peft runs it, or merged into them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from serve.errors import LoadFailed

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def check_folder(folder: Path, *, allow_pickle: bool) -> None:
    """Refuse a folder without an adapter that can be read. Raises LoadFailed."""
    if not (folder / CONFIG).is_file():
        raise LoadFailed(f"'{folder}' has no {CONFIG}: give a folder that peft's save_pretrained wrote")
    if (folder / WEIGHTS).is_file():
        return
    pickled = folder / "adapter_model.bin"
    if not pickled.is_file():
        raise LoadFailed(f"'{folder}' has an {CONFIG} but no weights ({WEIGHTS}): copy them there")
    if not allow_pickle:
        raise LoadFailed(
            f"'{pickled}' is pickled, and reading it can run code: save the adapter as safetensors, or pass "
            "--allow-pickle if you trust where it comes from"
        )


def attach(model: Any, folder: Path, *, name: str, merged: bool) -> tuple[Any, str]:
    """The model with the adapter's layers in it, or with their products added to its weights; and that in words.

    Raises LoadFailed where peft is not installed, and where the adapter does not fit the base.
    """
    try:
        peft = import_module("peft")
    except ImportError as error:
        raise LoadFailed(f"'{name}' has an adapter, which needs peft: pip install 'evalgate-lm[lora]'") from error
    settings = json.loads((folder / CONFIG).read_text())
    _check_places(model, settings, name=name)
    with warnings.catch_warnings(action="ignore"):  # it uses names that transformers has renamed
        found = peft.PeftModel.from_pretrained(model, str(folder), is_trainable=False)
    _check_weights(found, folder, peft, name=name)
    words = f"{str(settings.get('peft_type', 'adapter')).lower()} rank {settings.get('r')}"
    if merged:
        return found.merge_and_unload(safe_merge=False), f"with a {words} adapter merged into its weights"
    return found.base_model.model, f"with a {words} adapter beside its weights"


def _check_places(model: Any, settings: Mapping[str, Any], *, name: str) -> None:
    """Refuse an adapter of layers that the base does not have; peft only says so where none is there."""
    targets = settings.get("target_modules")
    layers = {path.rpartition(".")[2] for path, _ in model.named_modules()}
    absent = sorted(set(targets) - layers) if isinstance(targets, list) else []
    absent = [target for target in absent if not any(path.endswith(f".{target}") for path, _ in model.named_modules())]
    if absent:
        raise LoadFailed(
            f"'{name}': the adapter is for layers that the base does not have ({', '.join(absent[:3])}): it was "
            f"trained on another model ({settings.get('base_model_name_or_path') or 'unnamed'})"
        )


def _check_weights(found: Any, folder: Path, peft: Any, *, name: str) -> None:
    """Every tensor of the file is in the model, and every one of the model's was in the file.

    peft warns of the others, and leaves new ones at zero: the adapter then does nothing where they stand.
    """
    saved = peft.utils.load_peft_weights(str(folder), device="cpu")
    held = peft.get_peft_model_state_dict(found)
    missing, extra = sorted(held.keys() - saved.keys()), sorted(saved.keys() - held.keys())
    if missing:
        raise LoadFailed(f"'{name}': the adapter lacks {missing[0]} ({len(missing)} in all): get the complete adapter")
    if extra:
        raise LoadFailed(
            f"'{name}': the adapter has weights that the base does not use: {extra[0]} ({len(extra)} in all)"
        )
    broken = next((key for key, tensor in saved.items() if not bool(torch.isfinite(tensor.float()).all())), None)
    if broken is not None:
        raise LoadFailed(f"'{name}' has NaN or infinity in the adapter's '{broken}': it is broken")


def merge(model: Any) -> Any:
    """A model whose adapter stands beside its weights, with it merged; any other model as it is."""
    for path, module in list(model.named_modules()):
        if hasattr(module, "merge") and hasattr(module, "base_layer"):
            module.merge(safe_merge=False)
            parent, _, last = path.rpartition(".")
            setattr(model.get_submodule(parent), last, module.get_base_layer())
    return model


def has_adapter(model: Any) -> bool:
    """Whether some layer has an adapter beside its weights."""
    return any(hasattr(module, "base_layer") and hasattr(module, "merge") for module in model.modules())
