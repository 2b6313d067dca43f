"""Models for the engine: read once per source, checked, converted, described.

Several specs of one source (`demo`, `demo@int8`) read it from disk once; the tensors that a conversion
does not change are the same memory.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from serve.config import ModelSpec, Reading, check_device
from serve.errors import LoadFailed, ServeError
from serve.models import adapter, conversions, gguf, hashing, layers, room, weights
from serve.models.cache import cache_root
from serve.models.checkpoint import Compute, compute_in, read_checkpoint
from serve.models.checks import check_finite, check_loading, check_tied, named_tensors, root_cause
from serve.models.layers import LayerKind
from serve.models.quiet import quiet
from serve.models.scheme import dtype_name
from serve.models.skeleton import read_skeleton
from serve.models.source import Source, resolve
from serve.models.stream import WeightStream
from serve.models.tokenizerfiles import template_hash, tokenizer_hashes
from serve.models.weights import Weights

NO_LIMIT = 1 << 20  # tokens: the context of models whose layers count no positions
GGUF_REASON = "GGUF blocks are unpacked to float32"
_OF_FREE = 0.8  # of the memory that is free, where no limit is given: others may want some too
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode on its device, with its tokenizer and what a manifest records of it.

    vocab_size: rows of the output head (may exceed the tokenizer's ids). context_length: tokens.
    Hashes are xxh3-128 of contents: weights_hash of the files (or the state dict) and the conversion,
    tokenizer_hash of all that makes text into ids, vocabulary_hash of id -> token alone. dtype: of the weights
    in memory. load_mode: how the weights came to be. scheme: the conversion on load, "" where none. weights: how large
    they are, None where that was not counted. layers: what each kind of layer is made of. compute_reason: why it
    computes in its dtype. template_hash: of the chat template, "" where there is none. load_seconds: of reading it with
    its conversion, None where that was not counted. stream: where the weights come from, layer by layer; None = in
    memory.
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
    layers: tuple[LayerKind, ...] = ()
    compute_reason: str = ""
    template_hash: str = ""
    load_seconds: float | None = None
    stream: WeightStream | None = None

    @property
    def device(self) -> torch.device:
        """Where the model computes; its first layer's, where it is on several devices."""
        if self.stream is not None:
            return self.stream.device
        found: torch.device = next(self.model.parameters()).device
        return found


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
    layers: tuple[LayerKind, ...]
    compute_reason: str


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
    reading: Reading | None = None,
    failures: Failures | None = None,
    memory: str | None = None,
) -> list[LoadedModel]:
    """Load every spec, in order; `device` is a torch device name or "auto" (cuda where there is one).

    max_model_len caps each model's context length (tokens). reading: what may be read, and of which revision. Computes
    in float32 on CPU and in the checkpoint's own dtype elsewhere, unless a spec converts. failures: collects what
    cannot be loaded, which is then left out. memory: what the models may take (`serve.models.room.size_of`), None =
    what is free; where they need more, their weights are streamed. Raises LoadFailed with one sentence where a model
    cannot be loaded or what was loaded cannot be trusted.
    """
    spread = device == "auto" and torch.cuda.is_available() and torch.cuda.device_count() > 1
    device = found_device(device)
    loaded: dict[int, LoadedModel] = {}
    place = functools.partial(streamed_within, specs, reading=reading, memory=memory, together=failures is None)
    limit = place(device=device)
    if limit is not None and spread and memory is None and place(device=room.SEVERAL) is None:
        device, limit = room.SEVERAL, None  # too large for one device, and not for all of them
    with quiet(), torch.no_grad():
        for name in dict.fromkeys(spec.source for spec in specs):
            wanted = [(index, spec) for index, spec in enumerate(specs) if spec.source == name]
            with attempt([spec for _, spec in wanted], failures, alone=not loaded):
                source = resolve(name, reading)
                if limit is not None:
                    streamed = functools.partial(
                        _streamed, source, device=device, max_model_len=max_model_len, limit=limit, models=len(specs)
                    )
                    wanted = _all_streamed(streamed, wanted, loaded, failures, forced=memory is not None)
                    if not wanted:
                        continue
                if failures is not None and loaded:
                    _check_room(source, [spec for _, spec in wanted], device=device)
                reader = _Reader(source, reading or Reading(), device)
                for index, model in _load_source(reader, wanted, max_model_len=max_model_len, failures=failures):
                    loaded[index] = model
    return [loaded[index] for index in sorted(loaded)]


def _all_streamed(
    streamed: Callable[[ModelSpec], LoadedModel],
    wanted: Sequence[tuple[int, ModelSpec]],
    loaded: dict[int, LoadedModel],
    failures: Failures | None,
    *,
    forced: bool,
) -> list[tuple[int, ModelSpec]]:
    """Put the specs of one source that can be streamed into `loaded`; returns those to be loaded whole all the same.

    forced: there are none of those, since the user set the limit. How much a load takes is an estimate.
    """
    left = []
    for index, spec in wanted:
        with attempt([spec], failures, alone=True):
            try:
                loaded[index] = streamed(spec)
            except LoadFailed:
                if forced:
                    raise
                left.append((index, spec))
    return left


def streamed_within(
    specs: Sequence[ModelSpec], *, device: str, reading: Reading | None, memory: str | None, together: bool
) -> int | None:
    """The bytes that the models are to be streamed within; None where they fit into memory.

    together: all of them have to fit; else the first and the largest other one. Raises LoadFailed for a size that is
    none.
    """
    free = room.available(device)
    limit = room.size_of(memory, free=free) if memory is not None else free
    if limit is None:
        return None
    sizes: list[int] = []
    for name in dict.fromkeys(spec.source for spec in specs):
        try:
            source = resolve(name, reading)
        except LoadFailed:
            continue  # it is named where it is loaded
        sizes.append(room.needed(source, [s.conversion for s in specs if s.source == name], device=device))
    most = sum(sizes) if together else sum(sizes[:1]) + max(sizes[1:], default=0)
    if most <= limit:
        return None
    return limit if memory is not None else int(_OF_FREE * limit)


def _streamed(
    source: Source, spec: ModelSpec, *, device: str, max_model_len: int | None, limit: int, models: int
) -> LoadedModel:
    """A model of which only what lies outside its layers is in memory."""
    name = str(spec)
    skeleton = _surfacing(source.name, lambda: read_skeleton(source, device=device))
    conversion = conversions.find(spec.conversion) if spec.conversion else None
    whole = _surfacing(
        source.name, lambda: WeightStream(skeleton, conversion, name=name, device=device, split_above=limit)
    )
    stream = whole
    if 4 * max(piece.bytes for piece in whole.pieces) > limit:  # two of them, and as much that computes
        stream = WeightStream(skeleton, conversion, name=name, device=device, split_above=limit // 4)
    stream.limit, stream.models = limit, models
    digest = hashing.hash_files(source.weight_files, cache=cache_root())
    hashed = [digest, str(spec.recipe())] if spec.conversion else []
    hashes = tokenizer_hashes(skeleton.tokenizer, rows=_head_rows(stream.model, name=name))
    unpacked = "dequantized" in skeleton.mode
    size, kinds = _sizes(source, stream.model, _tensors(source, digest), "", digest, dequantized=unpacked)
    reason = GGUF_REASON if source.gguf else compute_in({}, device=device, dtype=None).reason
    if conversion is not None:
        kinds = layers.of_parts(list(conversion.parts(stream.model, name=name)))
        types, counted = conversion.stored(stream.model, name=name)
        size = weights.sized(types, parameters=weights.parameters_of(stream.model, quantized=False), counted=counted)
        reason = reason if conversion.dtype is None else f"asked for by @{spec.conversion}"
    described = describe(
        stream.model,
        skeleton.tokenizer,
        spec=spec,
        weights_hash=hashing.combine(hashed) if hashed else digest,
        vocabulary_hash=hashes.vocabulary,
        tokenizer_hash=hashes.rules,
        mode=skeleton.mode,
        scheme=stream.scheme,
        max_model_len=max_model_len,
        weights=size,
        layers=kinds,
        compute_reason=reason,
    )
    return replace(described, stream=stream)


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
    layers: tuple[LayerKind, ...] = (),
    compute_reason: str = "",
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
        layers=layers,
        compute_reason=compute_reason,
        template_hash=template_hash(tokenizer),
    )


def _load_source(
    reader: _Reader, wanted: Sequence[tuple[int, ModelSpec]], *, max_model_len: int | None, failures: Failures | None
) -> Iterator[tuple[int, LoadedModel]]:
    """Each wanted spec of one source, with its place in the caller's list."""
    began = time.monotonic()
    base = reader.read()
    reading = time.monotonic() - began
    checked = {id(tensor) for _, tensor in named_tensors(base.model)}
    for index, spec in wanted:
        model, began = None, time.monotonic()
        with attempt([spec], failures, alone=False):
            model = _of_base(reader, base, spec, checked, max_model_len=max_model_len)
        if model is not None:
            yield index, replace(model, load_seconds=reading + time.monotonic() - began)


def _of_base(
    reader: _Reader, base: _Base, spec: ModelSpec, checked: set[int], *, max_model_len: int | None
) -> LoadedModel:
    """One spec of a source that was read. checked: ids of the tensors that are known to be finite."""
    name, used, model, scheme, size = str(spec), base, base.model, "", base.weights
    conversion = conversions.find(spec.conversion) if spec.conversion else None
    dtype = conversion.dtype if conversion is not None else None
    kinds, reason = base.layers, base.compute_reason
    if conversion is not None and conversion.dequantizes and base.quantized:
        used = reader.read(dequantize=True)
        model, scheme, kinds, reason = used.model, "", used.layers, used.compute_reason
    elif conversion is not None and conversion.merges and reader.source.adapter is not None:
        used = reader.read(merged=True)
        model, kinds, reason = used.model, used.layers, used.compute_reason
    elif dtype is not None and base.quantized:  # packed weights stay; only what is computed changes
        used = reader.read(dtype=dtype)
        if used.model.dtype != dtype:
            raise LoadFailed(
                f"'{name}' is quantized ({used.load_mode}) and computes in {dtype_name(used.model.dtype)} whatever "
                f"is asked for: use '{reader.source.name}'"
            )
        model, scheme = used.model, f"{spec.conversion}: computed in {dtype_name(used.model.dtype)}"
        reason = f"asked for by @{spec.conversion}"
    elif conversion is not None and spec.conversion is not None:
        if reader.source.adapter is not None and not base.quantized:
            used = reader.read(merged=True)  # rounding is of whole weights, as an export would have them
        model, scheme = conversions.convert(used.model, spec.conversion, name=name)
        check_finite(model, name=name, known=checked)
        parts = list(conversion.parts(model, name=name))
        types, counted = conversion.stored(model, name=name)
        size = weights.sized(types, parameters=weights.parameters_of(model, quantized=False), counted=counted)
        kinds = layers.of_parts(parts)
        reason = base.compute_reason if dtype is None else f"asked for by @{spec.conversion}"
    hashed = [used.weights_hash, str(spec.recipe())] if spec.conversion else []
    return describe(
        model,
        used.tokenizer,
        spec=spec,
        weights_hash=hashing.combine(hashed) if hashed else used.weights_hash,
        vocabulary_hash=used.vocabulary_hash,
        tokenizer_hash=used.tokenizer_hash,
        mode=used.load_mode,
        scheme=scheme,
        max_model_len=max_model_len,
        weights=size,
        layers=kinds,
        compute_reason=reason,
    )


@dataclass(frozen=True)
class _Reader:
    """Reads one source, and checks what was read."""

    source: Source
    reading: Reading
    device: str

    def read(self, *, dtype: torch.dtype | None = None, dequantize: bool = False, merged: bool = False) -> _Base:
        """The model. dtype None: float32 on CPU, the checkpoint's own elsewhere. dequantize: unpack packed weights.
        merged: add an adapter to the weights.
        """
        source, name = self.source, self.source.name
        model, tokenizer, info, mode, why = _surfacing(name, lambda: self._load(dtype, dequantize=dequantize))
        quantized = not source.gguf and mode != "as stored"
        check_loading(info, name=name)
        check_finite(model, name=name)
        digest = hashing.hash_files(source.weight_files, cache=cache_root())
        tensors = _tensors(source, digest)
        if not source.gguf:
            check_tied(model, tensors, name=name)
        unpacked = dequantize or "dequantized" in mode
        size, kinds = _sizes(source, model, tensors, mode if quantized else "", digest, dequantized=unpacked)
        if source.adapter is not None:
            folder = source.adapter
            model, words = _surfacing(name, lambda: adapter.attach(model, folder, name=name, merged=merged))
            mode = f"{mode}, {words}"
        model.eval().requires_grad_(False)
        hashes = tokenizer_hashes(tokenizer, rows=_head_rows(model, name=name))
        return _Base(
            model, tokenizer, digest, mode, quantized, hashes.vocabulary, hashes.rules, size, kinds, why.reason
        )

    def _load(self, dtype: torch.dtype | None, *, dequantize: bool) -> tuple[Any, Any, Mapping[str, Any], str, Compute]:
        """Model, tokenizer, loading info, load mode, and what it computes in."""
        if self.source.gguf and self.device == room.SEVERAL:
            raise LoadFailed(
                f"'{self.source.name}' is too large for one CUDA device, and GGUF files cannot be split over several: "
                f"give "
                "--memory to stream its weights, or the checkpoint that it was made from"
            )
        if self.source.gguf:
            model, tokenizer, info = gguf.load_gguf(self.source.path, device=self.device)
            return model, tokenizer, info, gguf.LOAD_MODE, Compute(torch.float32, GGUF_REASON)
        return read_checkpoint(self.source, self.reading, device=self.device, dtype=dtype, dequantize=dequantize)


def _sizes(
    source: Source,
    model: Any,
    tensors: Sequence[weights.StoredTensor],
    method: str,
    digest: str,
    *,
    dequantized: bool,
) -> tuple[Weights | None, tuple[LayerKind, ...]]:
    """How large a model's weights are in its files, all together and by kind of layer."""
    base = replace(source, adapter=None)
    plain = weights.plain(model, quantized=bool(method))
    parameters = sum(parameter.numel() for parameter in plain.parameters())
    size = weights.remembered(base.tensor_files, parameters=parameters, digest=digest, cache=cache_root())
    if source.gguf:
        return size, layers.of_gguf(tensors)
    counts: dict[str, int] = {}
    for path, number in layers.by_module(plain):
        counts[path] = counts.get(path, 0) + number
    words = method.partition(", ")[0]
    return size, layers.of_checkpoint(model, tensors, parameters=counts, method=words, dequantized=dequantized)


def _tensors(source: Source, digest: str) -> list[weights.StoredTensor]:
    """The tensors of a source's files; none where their headers cannot be read, or tell nothing."""
    files = replace(source, adapter=None).tensor_files
    try:
        if source.gguf:
            return weights.remembered_tensors(files[0], digest=digest, cache=cache_root())
        return weights.safetensors_tensors([file for file in files if file.suffix == ".safetensors"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # the model has loaded: what its files say besides is not what it is judged by


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
