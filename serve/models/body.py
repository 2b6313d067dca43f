"""The body of a causal language model: everything below its output head."""

from __future__ import annotations

from typing import Any

from serve.errors import LoadFailed


def body_of(model: Any) -> Any:
    """The module that turns ids into last hidden states. Raises LoadFailed for a model that has none of its own.

    `base_model` is the model itself where a class names its body differently than its configuration does (Llama 4's
    text model). Then it is the part that holds the input embeddings.
    """
    body = model.base_model
    if body is model:
        embeddings = model.get_input_embeddings()
        parts = (part for part in model.children() if any(module is embeddings for module in part.modules()))
        body = next((part for part in parts if part is not embeddings), None)
    if body is None:
        raise LoadFailed(f"{type(model).__name__} has no body apart from its head: this architecture is not supported")
    return body
