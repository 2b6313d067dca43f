"""A real server in a thread over a tiny model, and the float64 truth about that model."""

from __future__ import annotations

import copy
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import torch
import uvicorn
from pydantic import BaseModel
from transformers import LlamaConfig, LlamaForCausalLM

from serve.api.replies import ChatChunk, ChatReply, CompletionChunk, CompletionReply
from serve.app import create_app
from serve.config import EngineConfig, ModelSpec, ServerConfig
from serve.engine.loop import Engine
from serve.models.load import describe
from serve.wire import ErrorReply
from tests.serve.tiny_models import byte_level
from tests.stuck import STUCK

CONTEXT = 256
REPLIES: dict[str, type[BaseModel]] = {"/v1/completions": CompletionReply, "/v1/chat/completions": ChatReply}
CHUNKS: dict[str, type[BaseModel]] = {"/v1/completions": CompletionChunk, "/v1/chat/completions": ChatChunk}


def wide_llama(context: int = CONTEXT, vocab_size: int = 304) -> LlamaForCausalLM:
    """A random Llama whose distributions are peaked enough to be told apart."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.3,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


@dataclass
class Served:
    url: str
    model: Any
    tokenizer: Any
    engine: Engine
    http: httpx2.Client

    def post(self, path: str, body: dict[str, Any], *, status: int = 200) -> Any:
        reply = self.http.post(path, json=body)
        assert reply.status_code == status, reply.text
        return documented(reply.json(), REPLIES.get(path) if status == 200 else ErrorReply)

    def complete(self, **body: Any) -> Any:
        return self.post("/v1/completions", body)

    def chat(self, **body: Any) -> Any:
        return self.post("/v1/chat/completions", body)

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream; asserts that it ends as it should."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as reply:
            assert reply.status_code == 200, reply.read()
            assert reply.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in reply.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return [documented(json.loads(line.removeprefix("data: ")), CHUNKS[path]) for line in lines[:-1]]

    def truth(self, ids: list[int]) -> torch.Tensor:
        """float64 log-softmax of the model's own forward, [tokens, vocabulary]; row i predicts token i + 1."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        return torch.log_softmax(logits.double(), -1)


def documented(body: Any, as_type: type[BaseModel] | None) -> Any:
    """The body; asserts that the OpenAPI schema's type has all of it, value for value."""
    if as_type is not None:
        assert as_type.model_validate(body, strict=True).model_dump(exclude_unset=True) == body
    return body


def ranked(row: torch.Tensor) -> list[int]:
    """Ids by (logprob descending, id ascending)."""
    return list(torch.argsort(row, descending=True, stable=True).tolist())


@contextmanager
def served(
    *,
    model: Any = None,
    tokenizer: Any = None,
    max_logprobs: int = 20,
    max_batch_tokens: int = 4096,
    kv_memory: int = 64 << 20,
    check_idle: bool = False,
    deterministic: bool = False,
    **server: Any,
) -> Iterator[Served]:
    model = wide_llama() if model is None else model
    own = copy.deepcopy(model)  # the engine replaces the attention of the model that it serves
    tokenizer = byte_level() if tokenizer is None else tokenizer
    engine = Engine(
        [describe(model, tokenizer, spec=ModelSpec("tiny"))],
        EngineConfig(
            device="cpu",
            kv_memory=kv_memory,
            max_logprobs=max_logprobs,
            max_batch_tokens=max_batch_tokens,
            check_idle=check_idle,
            deterministic=deterministic,
        ),
    )
    config = ServerConfig(**{"trust_request_templates": True, **server})
    app = create_app(engine, config)
    engine.start()
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # else asyncio leaves Nagle on, and each reply waits 40 ms
    listener.bind(("127.0.0.1", 0))
    web = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, lifespan="off"))
    thread = threading.Thread(target=lambda: web.run(sockets=[listener]), daemon=True)
    thread.start()
    while not web.started:
        time.sleep(0.005)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    try:
        with httpx2.Client(base_url=url, headers=headers, timeout=STUCK, trust_env=False) as http:
            yield Served(url, own, tokenizer, engine, http)
    finally:
        web.should_exit = True
        thread.join(STUCK)
        engine.stop()
        engine.check_integrity()
        listener.close()
