"""Configuration of the scoring server: frozen, derived values are properties."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from serve.errors import LoadFailed
from serve.wire import conversions, known_conversion, split_spec

LEAST_TOKENS = 16  # of keys and values: a smaller pool is of no use


def check_device(name: str) -> str:
    """The device name, checked. Raises LoadFailed, listing the valid ones, for any other."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", name):
        raise LoadFailed(f"'{name}' is not a device: use --device auto, cpu, cuda or cuda:N")
    return name


@dataclass(frozen=True)
class Recipe:
    """What a conversion does layer by layer. base: the conversion of all linear layers; layers: pattern and conversion,
    where the last pattern that names a layer decides.
    """

    base: str
    layers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """Read `NAME`, `NAME{PATTERN=NAME,PATTERN=NAME}` or the path of a recipe file, which is TOML.

        Raises LoadFailed for a conversion that there is not, and for what cannot be read.
        """
        if text.endswith(".toml"):
            return cls._read(text)
        base, brace, inside = text.partition("{")
        layers = []
        for part in inside.removesuffix("}").split(",") if brace else []:
            pattern, equals, name = part.strip().partition("=")
            if not (pattern and equals and name):
                raise LoadFailed(f"'{part.strip()}' in '{text}' is not PATTERN=CONVERSION, such as mlp=int8")
            layers.append((pattern.strip(), name.strip()))
        return cls(base, tuple(layers))._checked(text)

    @classmethod
    def _read(cls, path: str) -> Recipe:
        try:
            found = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        except OSError as error:
            raise LoadFailed(f"the recipe '{path}' cannot be read ({error.strerror}): check its path") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise LoadFailed(f"the recipe '{path}' is not TOML: {error}") from error
        unknown = found.keys() - {"base", "layers"}
        if unknown:
            raise LoadFailed(f"the recipe '{path}' has the key '{min(unknown)}': its keys are base and layers")
        layers = found.get("layers", {})
        if not isinstance(found.get("base"), str) or not isinstance(layers, dict):
            raise LoadFailed(f"the recipe '{path}' lacks its base: write base = \"int4-g128\", then a table [layers]")
        nested = next((key for key, value in layers.items() if not isinstance(value, str)), None)
        if nested is not None:
            raise LoadFailed(
                f"'{nested}' under [layers] in '{path}' is not a conversion's name: put patterns with dots in quotes"
            )
        return cls(found["base"], tuple(layers.items()))._checked(path)

    def _checked(self, text: str) -> Recipe:
        for name in (self.base, *(chosen for _, chosen in self.layers)):
            if not known_conversion(name):
                raise LoadFailed(
                    f"unknown conversion '@{name}' in '{text}': use one of {', '.join('@' + c for c in conversions())}"
                )
        return self

    def __str__(self) -> str:
        """The recipe as it stands after `@`; recipes of one text do the same, wherever they were read."""
        inside = ",".join(f"{pattern}={name}" for pattern, name in self.layers)
        return f"{self.base}{{{inside}}}" if inside else self.base


@dataclass(frozen=True)
class ModelSpec:
    """`SOURCE[@CONVERSION]`: a checkpoint folder, hub id, GGUF file or `demo`, converted on load."""

    source: str
    conversion: str | None = None

    @classmethod
    def parse(cls, text: str) -> ModelSpec:
        """Split a spec at its last `@`; an unknown conversion and a second one are refused by name.

        Raises LoadFailed for an empty source, an unknown conversion, or more than one, and as `Recipe.parse`.
        """
        if Path(text).expanduser().exists():  # a path may have an @ in its name
            return cls(text)
        source, conversion = split_spec(text)
        if not source:
            raise LoadFailed(f"'{text}' names no model: write SOURCE or SOURCE@CONVERSION")
        if conversion:
            cls(source, conversion).recipe()
        once, before = split_spec(source)
        if once and conversion and known_conversion(before.partition("{")[0]):
            ways = " or ".join(dict.fromkeys([f"{once}@{before}", f"{once}@{conversion}"]))
            raise LoadFailed(f"'{text}' names @{before} and @{conversion} and one conversion is possible: write {ways}")
        return cls(source, conversion or None)

    def recipe(self) -> Recipe | None:
        """What the conversion does; None where there is none. Raises as `Recipe.parse`."""
        return Recipe.parse(self.conversion) if self.conversion else None

    def __str__(self) -> str:
        return f"{self.source}@{self.conversion}" if self.conversion else self.source


@dataclass(frozen=True)
class Reading:
    """How models are read from where they are.

    revision: branch, tag or commit of hub ids. allow_pickle: read weights that are pickled. trust_remote_code: run
    Python code that a checkpoint brings.
    """

    revision: str | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the engine.

    device: torch device name ("auto" = cuda where there is one). max_batch_tokens: tokens of one packed
    forward. kv_memory: bytes of all KV pools together. tile_bytes:
    bytes of one rows x vocabulary float32 tile of logits (per model). max_logprobs: largest k served
    (-1 = the whole vocabulary). max_model_len: cap on the context length. deterministic: fixed tile shapes,
    so that a request's numbers are bit-identical in any batch, cold or cached. check_idle: verify pages and
    prefix trees whenever the engine has nothing to do. remember_checks: take a load-time check of the same weights,
    versions and machine as done (serve/engine/remembered.py). heads: name and file of output heads whose hidden rows
    come with the requests. heads_folder: where /v1/head writes the heads of models, None = nowhere. memory: what
    models may take (serve/models/room.py), None = what is free; where they need more, their weights are streamed.
    keep_rows: specs of models whose hidden rows are kept in the cache folder, and whose bodies are loaded only where
    rows are missing; keep_bytes: limit of all that is kept there.
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
    heads: tuple[tuple[str, str], ...] = ()
    heads_folder: str | None = None
    memory: str | None = None
    keep_rows: tuple[str, ...] = ()
    keep_bytes: int = 0


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
