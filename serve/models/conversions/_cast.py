"""What the conversions to another floating-point format share."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch

from serve.models.conversions._base import Change, Conversion, copy_sharing
from serve.models.scheme import dtype_name


class Cast(Conversion):
    """Every parameter and persistent buffer in one dtype, but for those the architecture keeps in float32.

    Those are what transformers keeps so on load.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype: torch.dtype = dtype

    @property
    def name(self) -> str:
        """See `Conversion`."""
        return _short(self.dtype)

    def round_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Conversion`."""
        return rows.to(self.dtype).float()

    def size(self, rows: int, columns: int) -> dict[str, int]:
        """See `Conversion`."""
        return {self.name.upper(): rows * columns * self.dtype.itemsize}

    def apply(self, model: Any, *, name: str) -> tuple[Any, str]:
        """The model in the dtype."""
        tensors = model.state_dict(keep_vars=True)
        changes = self.changes(model, name=name).items()
        converted = copy_sharing(model, {id(tensors[key]): change(tensors[key].detach()) for key, change in changes})
        _set_dtype(converted.config, self.dtype)
        return converted, self.scheme(model, name=name)

    @property
    def by_rows(self) -> bool:
        """See `Conversion`."""
        return True

    def changes(self, model: Any, *, name: str) -> dict[str, Change]:
        """See `Conversion`. Those tensors that a load in the dtype would hold in another one."""
        del name  # nothing can go wrong
        protected = _kept_in_float32(model, self.dtype)
        found: dict[str, Change] = {}
        for key, tensor in model.state_dict(keep_vars=True).items():
            wanted = torch.float32 if any(re.search(part, key) for part in protected) else self.dtype
            if tensor.is_floating_point() and tensor.dtype != wanted:
                found[key] = partial(torch.Tensor.to, dtype=wanted)
        return found

    def scheme(self, model: Any, *, name: str) -> str:
        """See `Conversion`."""
        del model, name  # all are named alike
        return f"{_short(self.dtype)}: all weights converted to {dtype_name(self.dtype)}"


def _short(dtype: torch.dtype) -> str:
    return dtype_name(dtype).replace("bfloat", "bf").replace("float", "f")


def _kept_in_float32(model: Any, dtype: torch.dtype) -> set[str]:
    """Patterns of tensor names that transformers loads in float32 although a 16-bit dtype is asked for."""
    kept: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        kept |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return {pattern.replace("*", ".*") for pattern in kept}


def _set_dtype(config: Any, dtype: torch.dtype) -> None:
    config.dtype = dtype
    text = config.get_text_config()
    if text is not config:
        text.dtype = dtype
