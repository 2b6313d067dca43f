"""Checkpoints that HQQ wrote (`AutoHQQHFModel.save_quantized`): a pickled file that transformers does not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from serve.models.readers._base import Reader


class Hqq(Reader):
    """Known by the name of its file."""

    library = "hqq"
    weights = "qmodel.pt"
    pickled = True

    def fits(self, folder: Path) -> bool:
        """See `Reader`."""
        return (folder / self.weights).is_file()

    def read(self, folder: Path, *, dtype: torch.dtype, device: str) -> tuple[Any, str]:
        """See `Reader`."""
        library = self.module("hqq.models.hf.base")
        model = library.AutoHQQHFModel.from_quantized(str(folder), compute_dtype=dtype, device=device)
        bits = {
            (int(layer.meta["nbits"]), layer.meta.get("group_size"))
            for layer in model.modules()
            if isinstance(getattr(layer, "meta", None), dict) and "nbits" in layer.meta
        }
        words = " and ".join(f"{count} bits" + (f" g{group}" if group else "") for count, group in sorted(bits))
        return model, f"hqq {words}"


READER = Hqq()
