"""Models for the engine: read once per source, checked, converted, described.

Several specs of one source (`demo`, `demo@int8`) read it from disk once; the tensors that a conversion
does not change are the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from serve.config import ModelSpec, check_device
from serve.errors import LoadFailed, ServeError
from serve.models import conversions, gguf, hashing, room, weights
from serve.models.cache import cache_root
from serve.models.checks import check_finite, check_loading, check_method, check_task, named_tensors, root_cause
from serve.models.quiet import quiet
from serve.models.scheme import dtype_name, load_mode
from serve.models.source import Source, resolve
from serve.models.tokenizerfiles import load_tokenizer, tokenizer_hashes
from serve.models.weights import Weights

NO_LIMIT = 1 << 20  # tokens: the context of models whose layers count no positions
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode on its device, with its tokenizer and what a manifest records of it.

    vocab_size: rows of the output head (may exceed the tokenizer's ids). context_length: tokens.
    Hashes are xxh3-128 of contents: weights_hash of the files (or the state dict) and the conversion,
    tokenizer_hash of all that makes text into ids, vocabulary_hash of id -> token alone. dtype: of the weights
    in memory. load_mode: how the weights came to be. scheme: the conversion on load, "" where none. weights: how large
    they are, None where that was not counted.
    """

    spec: ModelSpec
    name: str
    model: Any
    tokenizer: Any
    vocab_size: int
    context_length: int
    weights_hash: str
    tokenizer_hash: str
    vocabulary_hash: str
    dtype: str
    compute_dtype: str
    load_mode: str
    scheme: str
    weights: Weights | None = None


@dataclass(frozen=True)
class _Base:
    """A source as read from disk, before any conversion."""

    model: Any
    tokenizer: Any
    weights_hash: str
    load_mode: str
    quantized: bool
    vocabulary_hash: str
    tokenizer_hash: str
    weights: Weights | None


@dataclass
class Failures:
    """What could not be loaded, where loading goes on without it. reasons: by spec. no_room: specs that did not fit
    beside the models before them and may by themselves."""

    reasons: dict[str, str] = field(default_factory=dict)
    no_room: list[str] = field(default_factory=list)


def load_models(
    specs: Sequence[ModelSpec],
    *,
    device: str,
    max_model_len: int | None = None,
    revision: str | None = None,
    failures: Failures | None = None,
) -> list[LoadedModel]:
    """Load every spec, in order; `device` is a torch device name or "auto" (cuda where there is one).

    max_model_len caps each model's context length (tokens). revision: branch, tag or commit of hub ids. Computes in
    float32 on CPU and in the checkpoint's own dtype elsewhere, unless a spec converts. failures: collects what cannot
    be loaded, which is then left out. Raises LoadFailed with one sentence where a model cannot be loaded or what was
    loaded cannot be trusted.
    """
    device = found_device(device)
    loaded: dict[int, LoadedModel] = {}
    with quiet(), torch.no_grad():
        for name in dict.fromkeys(spec.source for spec in specs):
            wanted = [(index, spec) for index, spec in enumerate(specs) if spec.source == name]
            with attempt([spec for _, spec in wanted], failures, alone=not loaded):
                source = resolve(name, revision)
                if failures is not None and loaded:
                    _check_room(source, [spec for _, spec in wanted], device=device)
                for index, model in _load_source(
                    source, wanted, device=device, max_model_len=max_model_len, failures=failures
                ):
                    loaded[index] = model
    return [loaded[index] for index in sorted(loaded)]


@contextmanager
def attempt(specs: Sequence[ModelSpec], failures: Failures | None, *, alone: bool) -> Iterator[None]:
    """Note in `failures` why the specs could not be loaded inside the block; without `failures`, raise it.

    alone: nothing else is loaded, so that what does not fit never will.
    """
    try:
        yield
    except Exception as error:
        if failures is None:
            raise
        names = [str(spec) for spec in specs]
        if not alone and any(isinstance(e, _OUT_OF_MEMORY) for e in (error, error.__cause__)):
            failures.no_room += names
            return
        message = error.message if isinstance(error, ServeError) else root_cause(error)
        failures.reasons |= dict.fromkeys(names, message)


class _NoRoom(Exception):
    """A source would not fit beside what is loaded."""


_OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError, _NoRoom)


def _check_room(source: Source, specs: Sequence[ModelSpec], *, device: str) -> None:
    free = room.available(device)
    if free is not None and room.needed(source, [spec.conversion for spec in specs], device=device) > free:
        raise _NoRoom


def found_device(device: str) -> str:
    """The device to load on. Raises LoadFailed for a name that is none, and for a CUDA device that is not here."""
    check_device(device)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return "cuda" if count else "cpu"
    kind, _, index = device.partition(":")
    if kind == "cuda" and int(index or 0) >= count:
        have = f"cuda:0 to cuda:{count - 1}" if count > 1 else "cuda:0" if count else "none"
        raise LoadFailed(
            f"there is no CUDA device for --device {device} here (found: {have}): use --device auto or cpu"
        )
    return device


def describe(
    model: Any,
    tokenizer: Any,
    *,
    spec: ModelSpec,
    weights_hash: str | None = None,
    vocabulary_hash: str | None = None,
    tokenizer_hash: str | None = None,
    mode: str = "in memory",
    scheme: str = "",
    max_model_len: int | None = None,
    weights: Weights | None = None,
) -> LoadedModel:
    """A LoadedModel for a model that is already in memory (hashes not given are taken of its contents)."""
    model.eval().requires_grad_(False)
    _keep_softcap(model)
    name = str(spec)
    rows = _head_rows(model, name=name)
    vocabulary = vocabulary_hash or hashing.vocabulary_hash(tokenizer, rows=rows)
    return LoadedModel(
        spec=spec,
        name=name,
        model=model,
        tokenizer=tokenizer,
        vocab_size=rows,
        context_length=_context_length(model.config, max_model_len, name=name),
        weights_hash=weights_hash or hashing.hash_state(model),
        tokenizer_hash=tokenizer_hash or hashing.tokenizer_hash(tokenizer, vocabulary=vocabulary),
        vocabulary_hash=vocabulary,
        dtype=_weights_dtype(model),
        compute_dtype=dtype_name(model.dtype),
        load_mode=mode,
        scheme=scheme,
        weights=weights,
    )


def _load_source(
    source: Source,
    wanted: Sequence[tuple[int, ModelSpec]],
    *,
    device: str,
    max_model_len: int | None,
    failures: Failures | None,
) -> Iterator[tuple[int, LoadedModel]]:
    """Each wanted spec of one source, with its place in the caller's list."""
    base = _read(source, device=device, dtype=None)
    checked = {id(tensor) for _, tensor in named_tensors(base.model)}
    for index, spec in wanted:
        model = None
        with attempt([spec], failures, alone=False):
            model = _of_base(source, base, spec, checked, device=device, max_model_len=max_model_len)
        if model is not None:
            yield index, model


def _of_base(
    source: Source, base: _Base, spec: ModelSpec, checked: set[int], *, device: str, max_model_len: int | None
) -> LoadedModel:
    """One spec of a source that was read. checked: ids of the tensors that are known to be finite."""
    name, used, model, scheme, size = str(spec), base, base.model, "", base.weights
    conversion = conversions.find(spec.conversion) if spec.conversion else None
    dtype = conversion.dtype if conversion is not None else None
    if dtype is not None and base.quantized:  # packed weights stay; only what is computed changes
        used = _read(source, device=device, dtype=dtype)
        if used.model.dtype != dtype:
            raise LoadFailed(
                f"'{name}' is quantized ({used.load_mode}) and computes in {dtype_name(used.model.dtype)} whatever "
                f"is asked for: use '{source.name}'"
            )
        model, scheme = used.model, f"{spec.conversion}: computed in {dtype_name(used.model.dtype)}"
    elif conversion is not None and spec.conversion is not None:
        model, scheme = conversions.convert(base.model, spec.conversion, name=name)
        check_finite(model, name=name, known=checked)
        types, counted = conversion.stored(model, name=name)
        size = weights.sized(types, parameters=weights.parameters_of(model, quantized=False), counted=counted)
    parts = [used.weights_hash, str(spec.recipe())] if spec.conversion else []
    return describe(
        model,
        used.tokenizer,
        spec=spec,
        weights_hash=hashing.combine(parts) if parts else used.weights_hash,
        vocabulary_hash=used.vocabulary_hash,
        tokenizer_hash=used.tokenizer_hash,
        mode=used.load_mode,
        scheme=scheme,
        max_model_len=max_model_len,
        weights=size,
    )


def _read(source: Source, *, device: str, dtype: torch.dtype | None) -> _Base:
    """Read one source and check it. `dtype` None: float32 on CPU, the checkpoint's own elsewhere."""
    if source.gguf:
        model, tokenizer, info = _surfacing(source.name, lambda: gguf.load_gguf(source.path, device=device))
        mode, quantized = gguf.LOAD_MODE, False
    else:
        model, tokenizer, info, mode = _surfacing(
            source.name, lambda: _read_checkpoint(source, device=device, dtype=dtype)
        )
        quantized = mode != "as stored"
    check_loading(info, name=source.name)
    check_finite(model, name=source.name)
    model.eval().requires_grad_(False)
    digest = hashing.hash_files(source.weight_files, cache=cache_root())
    hashes = tokenizer_hashes(tokenizer, rows=_head_rows(model, name=source.name))
    files = source.weight_files if source.gguf else source.weight_files[1:]
    parameters = weights.parameters_of(model, quantized=quantized)
    size = weights.remembered(files, parameters=parameters, digest=digest, cache=cache_root())
    return _Base(model, tokenizer, digest, mode, quantized, hashes.vocabulary, hashes.rules, size)


def _read_checkpoint(
    source: Source, *, device: str, dtype: torch.dtype | None
) -> tuple[Any, Any, Mapping[str, Any], str]:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source.path, trust_remote_code=False)
    check_task(config, name=source.name)
    check_method(config, name=source.name)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise LoadFailed(f"'{source.name}' is not a causal language model ({config.model_type}): give one that is")
    asked = dtype if dtype is not None else (torch.float32 if device == "cpu" else "auto")
    placement = {} if device == "cpu" else {"device_map": {"": device}}
    model, info = AutoModelForCausalLM.from_pretrained(
        source.path,
        config=config,
        dtype=asked,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # so that check_loading can name them; they are refused there
        **placement,
    )
    return model, load_tokenizer(source.path), info, load_mode(config, model)


def _surfacing(name: str, load: Callable[[], Any]) -> Any:
    """Run a load; any library's error becomes one sentence with the cause that it may wrap."""
    try:
        return load()
    except ServeError:
        raise
    except Exception as error:
        raise LoadFailed(f"'{name}' cannot be loaded: {root_cause(error)}") from error


def _keep_softcap(model: Any) -> None:
    """Gemma 2's attention as it is defined: transformers 5.17 runs it with sdpa, which drops the cap."""
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    if capped and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")


def _head_rows(model: Any, *, name: str) -> int:
    head = model.get_output_embeddings()
    if head is None:
        raise LoadFailed(f"'{name}' has no output head: give a causal language model")
    rows = getattr(head, "out_features", None)
    return int(rows if rows is not None else head.weight.shape[0])


def _context_length(config: Any, cap: int | None, *, name: str) -> int:
    text = config.get_text_config()
    key = next((key for key in CONTEXT_KEYS if isinstance(getattr(text, key, None), int)), None)
    known = NO_LIMIT if key is None else int(getattr(text, key))
    if known < 1:
        raise LoadFailed(f"'{name}' has {key} {known} in its config.json: put the model's context length there")
    return known if cap is None else min(known, cap)


def _weights_dtype(model: Any) -> str:
    """The dtype that holds the most bytes of the model's parameters and buffers."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in {id(tensor): tensor for _, tensor in named_tensors(model)}.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel() * tensor.element_size()
    return dtype_name(max(sizes, key=lambda dtype: sizes[dtype]))
