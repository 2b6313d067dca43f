"""A model without its weights, and where each of them lies in its files.

transformers builds the model as it would to load it: on the meta device, with its quantizer's layers and the renamings
and conversions of the checkpoint's keys. Only its last step, reading all tensors, is held back; `WeightStream` takes
that step for one piece of the model at a time, through the same code, so that a piece has the weights that a whole
load gives.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from serve.errors import LoadFailed
from serve.models import gguf, readers
from serve.models.checkpoint import config_json, open_config
from serve.models.checks import check_code, check_loading
from serve.models.ggufcheck import apply_rope_factors, check_blocks, check_scaling, refuse_unused
from serve.models.scheme import load_mode
from serve.models.source import Source
from serve.models.tensorfiles import GgufTensor, OpenFile, Stored, stored_tensors
from serve.models.tokenizerfiles import load_tokenizer

_STREAMED = "load the model whole, with more --memory"
_exchanging = threading.Lock()


@dataclass
class Skeleton:
    """A model on the meta device and its tensors in their files.

    tensors: by the checkpoint's own names. load: transformers' settings of the load. targets: by the checkpoint's name,
    the state dict's first key that it becomes (part of). bytes_read: of all files so far.
    """

    model: Any
    tokenizer: Any
    mode: str
    tensors: dict[str, Stored]
    load: Any
    targets: dict[str, str] = field(default_factory=dict)
    bytes_read: int = 0

    def count(self, size: int) -> None:
        """Add to the bytes that were read."""
        self.bytes_read += size


def read_skeleton(source: Source, *, device: str) -> Skeleton:
    """The skeleton of a source, checked as a load is: nothing missing, nothing left over.

    Raises LoadFailed for what cannot be read layer by layer, with what to do instead.
    """
    made = _of_gguf(source, device=device) if source.gguf else _of_checkpoint(source, device=device)
    made.model.tie_weights()  # a load ties what it has read
    made.model.eval().requires_grad_(False)
    made.targets = _targets(made, name=source.name)
    return made


def _of_checkpoint(source: Source, *, device: str) -> Skeleton:
    raw = config_json(source)
    check_code(raw, name=source.name, trusted=False)
    if source.adapter is not None or readers.find(source.path) is not None:
        what = "an adapter" if source.adapter is not None else "weights that transformers does not read"
        raise LoadFailed(f"'{source.name}' has {what}, which cannot be streamed: {_STREAMED}")
    config = open_config(source, raw, trusted=False)
    if _quantization(config):
        raise LoadFailed(
            f"'{source.name}' is quantized ({_quantization(config)}), whose layers are unpacked only when all of them "
            f"are "
            f"there: {_STREAMED}"
        )
    made = Skeleton(None, load_tokenizer(source.path), "", {}, None)
    made.tensors = dict(stored_tensors(source.tensor_files, made.count))
    from transformers import AutoModelForCausalLM

    with _held_back(looks=device != "cpu") as kept:
        AutoModelForCausalLM.from_pretrained(
            source.path,
            config=config,
            dtype=torch.float32 if device == "cpu" else "auto",
            trust_remote_code=False,
        )
    made.model, made.load = kept["model"], kept["load"]
    made.mode = load_mode(config, made.model)
    return made


def _quantization(config: Any) -> str:
    for holder in (config, config.get_text_config()):
        stored = getattr(holder, "quantization_config", None)
        if stored is not None:
            found = stored if isinstance(stored, Mapping) else stored.to_dict()
            return str(found.get("quant_method", "an unnamed method"))
    return ""


def _of_gguf(source: Source, *, device: str) -> Skeleton:
    """The same of a GGUF file, whose tensors are dequantized as they are read."""
    import gguf as reading
    import transformers
    from transformers import modeling_gguf_pytorch_utils as legacy

    name = str(source.path)
    with gguf.one_reader():
        tokenizer = gguf.cached_tokenizer(source.path)
        reader = reading.GGUFReader(source.path)
        check_blocks(reader, name=name)
        config = transformers.AutoConfig.from_pretrained(source.path.parent, gguf_file=source.path.name)
        check_scaling(reader, config, name=name)
        applied = apply_rope_factors(reader, config, name=name)
        parsed = legacy.load_gguf_checkpoint(str(source.path))["config"]
        made = Skeleton(None, tokenizer, gguf.LOAD_MODE, {}, None)
        original = legacy.load_gguf_checkpoint

        def without_tensors(path: Any, return_tensors: bool = False, **options: Any) -> Any:
            return {"tensors": {}} if return_tensors else original(path, return_tensors=False)

        options: dict[str, Any] = {}
        if hasattr(transformers, "GgufConfig"):
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        legacy.load_gguf_checkpoint = without_tensors
        try:
            with _held_back() as kept:
                transformers.AutoModelForCausalLM.from_pretrained(
                    source.path.parent, gguf_file=source.path.name, config=config, dtype=torch.float32, **options
                )
        finally:
            legacy.load_gguf_checkpoint = original
        made.model, made.load = kept["model"], replace(kept["load"], hf_quantizer=None)  # nothing stays packed
        if kept["tensors"]:
            raise LoadFailed(
                f"'{source.name}' is of an architecture ({config.model_type}) whose GGUF files cannot be read layer by "
                f"layer yet: {_STREAMED}, or give the checkpoint that it was made from"
            )
        architecture = reader.fields["general.architecture"].contents()
        made_by = legacy.TENSOR_PROCESSORS.get(architecture, legacy.TensorProcessor)
        processor = made_by(config=parsed)
        places = legacy.get_gguf_hf_weights_map(made.model, processor)
    refuse_unused({t.name for t in reader.tensors if t.name not in places} - applied, name=name)
    file = OpenFile(source.path, made.count)
    made.tensors = {
        places[tensor.name]: _gguf_tensor(file, tensor, processor, plain=made_by is legacy.TensorProcessor, name=name)
        for tensor in reader.tensors
        if tensor.name in places
    }
    for holder, mark in ((made.model, "hf_quantizer"), (made.model.config, "quantization_config")):
        if hasattr(holder, mark):
            delattr(holder, mark)
    return made


def _gguf_tensor(file: OpenFile, tensor: Any, processor: Any, *, plain: bool, name: str) -> GgufTensor:
    if "_exps." in tensor.name:
        raise LoadFailed(
            f"'{name}' has experts, which transformers puts together from the whole GGUF file: give the checkpoint "
            f"that it "
            "was made from, or more --memory"
        )
    shape = tuple(int(extent) for extent in reversed(tensor.shape))

    def process(weights: Any) -> Any:
        found = processor.process(weights=weights, name=tensor.name, tensor_key_mapping={}, parsed_parameters={})
        return found.weights

    rows = 1
    for extent in shape[:-1]:
        rows *= extent
    # what a processor changes, it changes by name: embeddings and heads are left as they are, or the check says so
    return GgufTensor(
        file=file,
        kind=tensor.tensor_type,
        shape=shape,
        offset=int(tensor.data_offset),
        row_bytes=int(tensor.n_bytes) // rows,
        process=process,
        by_rows=plain or tensor.name in ("token_embd.weight", "output.weight"),
    )


@contextmanager
def _held_back(*, looks: bool = False) -> Iterator[dict[str, Any]]:
    """Keep transformers from reading tensors, and catch the model and the settings that it would read them with.

    looks: let it open the files, to see which dtype they are of.
    """
    from transformers import modeling_utils as loading
    from transformers.modeling_utils import LoadStateDictInfo

    kept: dict[str, Any] = {}

    def instead(model: Any, state_dict: Any, load_config: Any, **_: Any) -> Any:
        for tensor in model.state_dict(keep_vars=True).values():
            tensor._is_hf_initialized = True  # it stays without data: nothing is to be drawn for it
        kept.update(model=model, load=load_config, tensors=state_dict)
        return LoadStateDictInfo(set(), set(), set(), [], {}, set()), None

    with _exchanging:
        original, opened = loading.convert_and_load_state_dict_in_model, loading.safe_open
        loading.convert_and_load_state_dict_in_model = instead
        if not looks:
            loading.safe_open = _Unopened
        try:
            yield kept
        finally:
            loading.convert_and_load_state_dict_in_model, loading.safe_open = original, opened


class _Unopened:
    """A safetensors file of which nothing is asked: opening one maps all of it, privately and writable."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def keys(self) -> list[str]:
        """No tensors."""
        return []

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""


def _targets(made: Skeleton, *, name: str) -> dict[str, str]:
    """Which key of the state dict each stored tensor becomes. Raises LoadFailed as `check_loading` does."""
    from transformers import core_model_loading as core
    from transformers.modeling_utils import LoadStateDictInfo

    mapping = made.load.weight_mapping or []
    renamings = [entry for entry in mapping if isinstance(entry, core.WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, core.WeightConverter)]
    by_source = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    expected = made.model.state_dict()
    info = LoadStateDictInfo(set(expected), set(), set(), [], {}, set())
    prefix = made.model.base_model_prefix
    found: dict[str, str] = {}
    for key in made.tensors:
        target, pattern = core.rename_source_key(key, renamings, converters, prefix, expected)
        if target not in expected and key in expected:
            target, pattern = core.rename_source_key(key, [], [], prefix, expected)
        if target not in expected:
            info.unexpected_keys.add(target)
            continue
        found[key] = target
        info.missing_keys.discard(target)
        if pattern is not None:
            first, *others = by_source[pattern].target_patterns
            info.missing_keys -= {target.replace(first, other) for other in others}
    made.model.mark_tied_weights_as_initialized(info)
    tied = set(made.model.all_tied_weights_keys)
    info.missing_keys -= {key for key in info.missing_keys if key in tied}
    made.model._adjust_missing_and_unexpected_keys(info)
    check_loading(info.to_dict(), name=name)
    return found
