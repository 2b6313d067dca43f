"""GGUF files: dequantized to float32 by transformers, and kept in the cache so that later starts are quick.

A cache entry is keyed by the file's hash, the transformers version and FORMAT, and is only published
where reading it back gives bitwise the same weights and the same tokenizer.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from serve.errors import LoadFailed
from serve.models import cache
from serve.models.ggufcheck import apply_rope_factors, check_blocks, check_scaling, refuse_unused, watched
from serve.models.hashing import cached_file_hash
from serve.models.tokenizerfiles import load_tokenizer, same_tokenizer

FORMAT = 2  # of what is kept in the cache; 1 could lack tensors
LOAD_MODE = "GGUF dequantized to float32"


def load_gguf(path: Path, *, device: str) -> tuple[Any, Any, dict[str, Any]]:
    """(model in float32 on `device`, tokenizer, transformers' loading info) of a GGUF file.

    Raises LoadFailed where the `gguf` package is missing or the file was cut; lets transformers' own errors through.
    """
    if importlib.util.find_spec("gguf") is None:
        raise LoadFailed("reading GGUF files needs the gguf package: pip install 'evalgate-lm[gguf]'")
    key = _key(path)
    with cache.lock(key), one_reader():
        try:
            tokenizer = cached_tokenizer(path)
            model, info = _cached_model(path, f"{key}/model", device=device)
        except struct.error as error:  # transformers' own reader of the header met the file's end
            raise _not_whole(path) from error
    return model, tokenizer, info


def _not_whole(path: Path | str) -> LoadFailed:
    return LoadFailed(f"'{path}' is not a whole GGUF file, it was cut or damaged: get it again")


def _key(path: Path) -> str:
    import transformers

    digest = cached_file_hash(path, cache=cache.cache_root())
    return f"gguf/{FORMAT}-{transformers.__version__}-{digest}"


def cached_tokenizer(path: Path) -> Any:
    """The tokenizer of a GGUF file, read from the cache from the second time on."""
    from transformers import AutoTokenizer

    name = f"{_key(path)}/tokenizer"
    folder = cache.verified(name)
    if folder is not None:
        return load_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)

    def build(target: Path) -> bool:
        tokenizer.save_pretrained(target)
        return same_tokenizer(tokenizer, AutoTokenizer.from_pretrained(target))

    cache.publish(name, build)
    return tokenizer


def _cached_model(path: Path, name: str, *, device: str) -> tuple[Any, dict[str, Any]]:
    folder = cache.verified(name)
    if folder is not None:
        return _read_saved(folder, device=device)
    model, info = _dequantize(path)
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())

    def build(target: Path) -> bool:
        model.save_pretrained(target)
        saved, _ = _read_saved(target, device="cpu")
        return _same_weights(model, saved)

    if not any(info.values()) and size <= cache.weights_limit():
        cache.publish(name, build)
    return model.to(device), info


def _dequantize(path: Path) -> tuple[Any, dict[str, Any]]:
    """The plain float32 model; the marks of quantization are taken off, as nothing of it is left."""
    import gguf
    import transformers

    reader = gguf.GGUFReader(path)
    check_blocks(reader, name=str(path))
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    check_scaling(reader, config, name=str(path))
    applied = apply_rope_factors(reader, config, name=str(path))
    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # newer ones may keep blocks packed where a kernel is installed
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with watched() as missed:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            **options,
        )
    refuse_unused(missed - applied, name=str(path))
    packed = [key for key, weight in model.named_parameters() if weight.dtype != torch.float32]
    if packed:
        raise LoadFailed(f"'{path}' was not dequantized to float32: '{packed[0]}' has another dtype")
    for holder, mark in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(holder, mark):
            delattr(holder, mark)
    return model, info


def _read_saved(folder: Path, *, device: str) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    placement = {} if device == "cpu" else {"device_map": {"": device}}
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **placement
    )
    return model, info


def _same_weights(left: Any, right: Any) -> bool:
    ours, theirs = left.state_dict(), right.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


_exchanging = threading.Lock()


@contextlib.contextmanager
def one_reader() -> Iterator[None]:
    """Let transformers parse each file once instead of three times, and over a plain array.

    `gguf.GGUFReader` slices an np.memmap once per vocabulary entry, and nearly all of a load's time went
    into making those memmap views (measured: 10 s per parse of a 262144-entry vocabulary).
    transformers looks the class up at each call, so it is exchanged for the duration of one load.
    """
    import gguf
    import numpy as np

    class PlainReader(gguf.GGUFReader):  # type: ignore[misc]
        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            self._plain = np.asarray(mapped)

    @functools.lru_cache(maxsize=1)
    def read(path: str) -> PlainReader:
        try:
            return PlainReader(path)
        except (ValueError, IndexError, KeyError, struct.error) as error:
            raise _not_whole(path) from error

    with _exchanging:
        kept, gguf.GGUFReader = (
            gguf.GGUFReader,
            lambda path: read(os.path.realpath(path)),
        )  # one key for every way to write it
        try:
            yield
        finally:
            gguf.GGUFReader = kept
