"""The body of a causal language model: everything below its output head."""

from __future__ import annotations

from typing import Any

from serve.errors import LoadFailed


def body_of(model: Any) -> Any:
    """The module that turns ids into last hidden states. Raises LoadFailed for a model that has none of its own.

    `base_model` is the model itself where a class names its body differently than its configuration does (Llama 4's
    text model), so the decoder is asked for then.
    """
    body = model.base_model
    if body is model:
        body = model.get_decoder() if hasattr(model, "get_decoder") else None
    if body is None or body is model:
        raise LoadFailed(f"{type(model).__name__} has no body apart from its head: this architecture is not supported")
    return body
