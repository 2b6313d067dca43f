"""GET /health, GET /v1/models and GET /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from serve.engine.kept import KeptRows, StoredModel
from serve.engine.runtime import HeadRuntime
from serve.errors import Draining
from serve.state import ServerState
from serve.wire import ModelCard, ModelList


def card(model: HeadRuntime, created: int, kept: KeptRows | None = None) -> ModelCard:
    """One model as /v1/models shows it."""
    loaded = model.loaded
    facts: dict[str, Any] = {
        "spec": str(loaded.spec),
        "vocab_size": model.head.vocab_size,
        "weights_hash": loaded.weights_hash,
        "tokenizer_hash": loaded.tokenizer_hash,
        "vocabulary_hash": loaded.vocabulary_hash,
        "eos_token_id": loaded.tokenizer.eos_token_id,
        "dtype": loaded.dtype,
        "compute_dtype": loaded.compute_dtype,
        "logits_dtype": model.head.dtype,
        "compute_reason": loaded.compute_reason,
        "template_hash": loaded.template_hash,
        "load_mode": loaded.load_mode,
        "load_seconds": loaded.load_seconds,
        "layers": [kind.document() for kind in loaded.layers],
        "scheme": loaded.scheme,
        "backend": model.backend,
        "noise_floor": model.deviation,
        "kl_floor": model.kl_floor,
        "weights": None if loaded.weights is None else loaded.weights.document(),
        "streamed": None if model.streamed is None else model.streamed.plan.document(),
        "scored_tokens": model.scored_tokens,
        "scoring_seconds": model.scoring_seconds,
        "device": str(loaded.device),
        "kept_rows": None if kept is None else {**kept.facts(), "stored": isinstance(model, StoredModel)},
    }
    return ModelCard(id=model.name, created=created, max_model_len=model.context_length, evalgate=facts)


def router(state: ServerState) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> dict[str, str]:
        """200 while requests are answered; 503 while models load, while the server ends, and once the engine failed."""
        failure = state.engine.failure
        if failure is not None:
            raise Draining(failure.message)
        return {"status": "ok"}

    @routes.get("/v1/models")
    async def models() -> ModelList:
        """The resident models."""
        kept = state.engine.kept
        return ModelList(data=[card(m, int(state.started), kept.get(m.name)) for m in state.engine.sides])

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> ModelCard:
        """One resident model."""
        return card(state.engine.side(name), int(state.started), state.engine.kept.get(name))

    return routes
