"""Checkpoints that optimum-quanto wrote (`QuantizedModelForCausalLM.save_pretrained`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from serve.models.readers._base import Reader

_MAP = "quanto_qmap.json"


class Quanto(Reader):
    """Known by its map of which layer has which type."""

    library = "optimum-quanto"
    weights = "model.safetensors"

    def fits(self, folder: Path) -> bool:
        """See `Reader`."""
        return (folder / _MAP).is_file()

    def read(self, folder: Path, *, dtype: torch.dtype, device: str) -> tuple[Any, str]:
        """See `Reader`. The scales keep the dtype that they were stored in, which is what it computes in."""
        del dtype  # its packed tensors do not take another
        wrapped = self.module("optimum.quanto").QuantizedModelForCausalLM.from_pretrained(str(folder))
        chosen = json.loads((folder / _MAP).read_text()).values()
        schemes = {(str(one.get("weights")), str(one.get("activations"))) for one in chosen}
        words = [w if a in ("none", "None") else f"{w} with {a} activations" for w, a in sorted(schemes)]
        return wrapped._wrapped.to(device), f"quanto {' and '.join(words)}"


READER = Quanto()
