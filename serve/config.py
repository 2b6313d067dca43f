"""Configuration of the scoring server: frozen, derived values are properties."""

from __future__ import annotations

import re
from dataclasses import dataclass

from serve.errors import LoadFailed
from serve.wire import conversions

LEAST_TOKENS = 16  # of keys and values: a smaller pool is of no use


def check_device(name: str) -> str:
    """The device name, checked. Raises LoadFailed, listing the valid ones, for any other."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", name):
        raise LoadFailed(f"'{name}' is not a device: use --device auto, cpu, cuda or cuda:N")
    return name


@dataclass(frozen=True)
class ModelSpec:
    """`SOURCE[@CONVERSION]`: a checkpoint folder, hub id, GGUF file or `demo`, converted on load."""

    source: str
    conversion: str | None = None

    @classmethod
    def parse(cls, text: str) -> ModelSpec:
        """Split a spec at its last `@`; an unknown conversion and a second one are refused by name.

        Raises LoadFailed for an empty source, an unknown conversion, or more than one.
        """
        known = conversions()
        source, at, conversion = text.rpartition("@")
        if not at or not re.fullmatch(r"[A-Za-z0-9_-]+", conversion):
            source, conversion = text, ""
        elif conversion not in known:
            raise LoadFailed(
                f"unknown conversion '@{conversion}' in '{text}': use one of {', '.join('@' + c for c in known)}"
            )
        if not source:
            raise LoadFailed(f"'{text}' names no model: write SOURCE or SOURCE@CONVERSION")
        once, _, before = source.rpartition("@")
        if once and conversion and before in known:
            ways = " or ".join(dict.fromkeys([f"{once}@{before}", f"{once}@{conversion}"]))
            raise LoadFailed(f"'{text}' names @{before} and @{conversion} and one conversion is possible: write {ways}")
        return cls(source, conversion or None)

    def __str__(self) -> str:
        return f"{self.source}@{self.conversion}" if self.conversion else self.source


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the engine.

    device: torch device name ("auto" = cuda where there is one). max_batch_tokens: tokens of one packed
    forward. kv_memory: bytes of all KV pools together. tile_bytes:
    bytes of one rows x vocabulary float32 tile of logits (per model). max_logprobs: largest k served
    (-1 = the whole vocabulary). max_model_len: cap on the context length. deterministic: fixed tile shapes,
    so that a request's numbers are bit-identical in any batch, cold or cached. check_idle: verify pages and
    prefix trees whenever the engine has nothing to do. remember_checks: take a load-time check of the same weights,
    versions and machine as done (serve/engine/remembered.py).
    """

    device: str = "auto"
    max_batch_tokens: int = 4096
    kv_memory: int = 1 << 30
    tile_bytes: int = 128 << 20
    max_logprobs: int = 20
    max_model_len: int | None = None
    max_sequences: int = 256
    logits: str = "float32"  # "model" = the model's own head, in the dtype it gives
    deterministic: bool = False
    check_idle: bool = False
    remember_checks: bool = False


@dataclass(frozen=True)
class ServerConfig:
    """How the server listens and what it takes.

    api_key None = open (loopback only). max_concurrent_requests: POST requests answered at once; more get 429.
    body_seconds: time for a request's body to arrive.
    long_texts: whether /tokenize takes texts that are longer than the model's context can hold.
    reasoning_parser, tool_parser: a file of serve/api/parsers, "none", or "auto" (by the chat template).
    trust_request_templates: whether a request may bring its own chat template (it is code that runs here).
    """

    host: str = "127.0.0.1"
    port: int = 0
    api_key: str | None = None
    max_body_bytes: int = 64 << 20
    max_concurrent_requests: int = 512
    reasoning_parser: str = "auto"
    tool_parser: str = "auto"
    trust_request_templates: bool = False
    body_seconds: float = 60.0
    long_texts: bool = False
