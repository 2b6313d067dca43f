"""How endpoints are reached: key, headers, proxy, certificates, patience. Secrets are read late and never kept."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from evalgate.errors import UsageError

KEY_VARIABLE = "EVALGATE_ENDPOINT_KEY"  # read where no other place is named


@dataclass(frozen=True)
class LlamaSettings:
    """Sizes of a llama.cpp server that we start. threads None = its own choice; gpu_layers -1 = all that fit."""

    threads: int | None = None
    gpu_layers: int = -1


@dataclass(frozen=True)
class EndpointSettings:
    """How endpoints are asked.

    dialect: "" = the one that the probe finds. top_k: alternatives per position, None = 20 or what the endpoint serves.
    concurrency: most requests at once per URL; the client goes below it where the server says so. timeout:
    seconds for one whole reply. patience: seconds for which a failing request is tried again. key_variable,
    key_file: where the API key is. headers: (name, value), values never shown. proxy: "" = as the environment
    says. ca_file: certificates to trust, "" = the system's. tokenizer: spec of the model whose tokenizer cuts
    the text where no side is embedded, "" = the reference endpoint's own /tokenize.
    """

    dialect: str = ""
    top_k: int | None = None
    concurrency: int = 16
    timeout: float = 120.0
    patience: float = 30.0
    key_variable: str = ""
    key_file: str = ""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    proxy: str = field(default="", repr=False)
    ca_file: str = ""
    tokenizer: str = ""
    llama: LlamaSettings = LlamaSettings()

    def key(self) -> str | None:
        """The API key, None where there is none. Raises UsageError where a named place holds none."""
        if self.key_file:
            try:
                key = Path(self.key_file).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"the key file {self.key_file} cannot be read ({type(error).__name__})") from None
            if not key:
                raise UsageError(f"the key file {self.key_file} is empty: put the API key into it")
            return _checked(key, self.key_file)
        if self.key_variable:
            key = os.environ.get(self.key_variable, "").strip()
            if not key:
                raise UsageError(f"the environment variable {self.key_variable} is not set: put the API key into it")
            return _checked(key, self.key_variable)
        key = os.environ.get(KEY_VARIABLE, "").strip()
        return _checked(key, KEY_VARIABLE) if key else None

    def public(self) -> dict[str, Any]:
        """The settings as a manifest may show them: no key, no header's value, no proxy password."""
        proxy = urlsplit(self.proxy)
        return {
            "dialect": self.dialect,
            "top_k": self.top_k,
            "concurrency": self.concurrency,
            "timeout": self.timeout,
            "patience": self.patience,
            "headers": sorted(name for name, _ in self.headers),
            "proxy": f"{proxy.scheme}://{proxy.hostname}" if self.proxy else "",
            "ca_file": self.ca_file,
            "tokenizer": self.tokenizer,
            "llama_threads": self.llama.threads,
            "llama_gpu_layers": self.llama.gpu_layers,
        }


def _checked(key: str, where: str) -> str:
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(f"the API key in {where} holds characters that no header can carry: check it")
    return key
