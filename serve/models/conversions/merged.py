"""`@merged`: a model with a LoRA adapter (`BASE+ADAPTER`) whose products are added to its weights."""

from __future__ import annotations

from typing import Any

from serve.errors import LoadFailed
from serve.models.conversions._base import Conversion


class Merged(Conversion):
    """As an adapter is exported; without it, the adapter runs beside the weights, as it was trained."""

    merges = True

    def apply(self, model: Any, *, name: str) -> tuple[Any, str]:
        """Refuse a model without an adapter: one with an adapter is read again in its place."""
        raise LoadFailed(f"'{name}' has no adapter to merge: write BASE+ADAPTER@merged, or leave @merged out")


CONVERSION = Merged()
