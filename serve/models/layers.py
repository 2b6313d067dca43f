"""What each kind of layer of a model is made of: its bits a weight, its scheme, and how its activations are rounded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from serve.models.conversions import Part
from serve.models.weights import StoredTensor

NORMS = "norms"
_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_PLAIN = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True)
class LayerKind:
    """All layers of one kind that are stored alike.

    kind: the layer's name without its numbers: "self_attn.q_proj"; vectors are all "norms". bytes: as stored, scales
    included. parameters: weights of the architecture, 0 where not known. scheme: of its weights. activations: how its
    inputs are rounded while it computes, "" = not at all. dequantized: whether its weights were unpacked on load.
    """

    kind: str
    layers: int
    parameters: int
    bytes: int
    scheme: str
    activations: str = ""
    dequantized: bool = False

    def document(self) -> dict[str, Any]:
        """As /v1/models shows it."""
        return asdict(self)


@dataclass(frozen=True)
class StoredLayer:
    """One layer of a model. path: of its module. vector: whether its parameters have one dimension."""

    path: str
    parameters: int
    bytes: int
    scheme: str
    activations: str = ""
    dequantized: bool = False
    vector: bool = False


def kinds(layers: Iterable[StoredLayer]) -> tuple[LayerKind, ...]:
    """Layers by kind, scheme and activations, the largest first."""
    found: dict[tuple[str, str, str, bool], list[StoredLayer]] = {}
    for layer in layers:
        kind = NORMS if layer.vector else kind_of(layer.path)
        found.setdefault((kind, layer.scheme, layer.activations, layer.dequantized), []).append(layer)
    rows = [
        LayerKind(
            kind,
            len({layer.path for layer in many}),
            sum(layer.parameters for layer in many),
            sum(layer.bytes for layer in many),
            scheme,
            activations,
            dequantized,
        )
        for (kind, scheme, activations, dequantized), many in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.kind, row.scheme)))


def kind_of(path: str) -> str:
    """`self_attn.q_proj` for `model.layers.3.self_attn.q_proj`, `ffn_up` for `blk.3.ffn_up`, `lm_head` for itself."""
    inside = re.split(r"\.\d+\.", path, maxsplit=1)
    if len(inside) == 2:
        return _NUMBER.sub("", inside[1])
    return path.rpartition(".")[2]


def of_parts(parts: Iterable[Part]) -> tuple[LayerKind, ...]:
    """The kinds of a converted model, as its formats would take them."""
    return kinds(
        StoredLayer(part.path, part.parameters, sum(part.types.values()), part.scheme, vector=part.vector)
        for part in parts
    )


def of_gguf(tensors: Iterable[StoredTensor]) -> tuple[LayerKind, ...]:
    """The kinds of a GGUF file, which is dequantized on load; float32 tensors are as they were stored."""
    return kinds(
        StoredLayer(
            tensor.name.removesuffix(".weight"),
            tensor.elements,
            tensor.size,
            tensor.type,
            dequantized=tensor.type != "F32",
            vector=tensor.dimensions < 2,
        )
        for tensor in tensors
    )


def of_checkpoint(
    model: nn.Module, tensors: Iterable[StoredTensor], *, parameters: Mapping[str, int], method: str, dequantized: bool
) -> tuple[LayerKind, ...]:
    """The kinds of a checkpoint, by the tensors that its files hold for each module of the loaded model.

    parameters: weights of the architecture by module. method: the quantization in words, for layers that do not say
    their own. dequantized: whether packed layers were unpacked on load.
    """
    modules = dict(model.named_modules())
    by_module: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        by_module.setdefault(_owner(tensor.name, modules), []).append(tensor)
    layers = []
    for path, many in by_module.items():
        packed = method and (any(one.type not in _PLAIN for one in many) or any("scale" in one.name for one in many))
        label, activations = scheme_of(modules.get(path), method) if packed else (_largest(many), "")
        layers.append(
            StoredLayer(
                path or many[0].name,
                parameters.get(path, 0 if packed else sum(one.elements for one in many)),
                sum(one.size for one in many),
                label,
                "" if dequantized else activations,
                dequantized=bool(packed and dequantized),
                vector=all(one.dimensions < 2 for one in many) and not packed,
            )
        )
    return kinds(layers)


def by_module(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Path of every module that holds parameters, and how many numbers are in them; tied ones where they are first."""
    for path, parameter in model.named_parameters():
        yield path.rpartition(".")[0], parameter.numel()


def _owner(name: str, modules: Mapping[str, object]) -> str:
    """The module that a stored tensor belongs to: the longest path that its name starts with."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        path = ".".join(parts[:end])
        if path in modules:
            return path
    return ""


def _largest(tensors: Iterable[StoredTensor]) -> str:
    return max(tensors, key=lambda one: one.size).type


def scheme_of(module: object, method: str) -> tuple[str, str]:
    """A packed layer's scheme and how its inputs are rounded, as the layer itself says, or its quantization."""
    scheme = getattr(module, "quantization_scheme", None)  # compressed-tensors
    if scheme is not None:
        return _arguments(scheme.weights), _arguments(scheme.input_activations)
    kind, weight = type(module).__name__, getattr(module, "weight", None)
    if kind == "Linear4bit":  # bitsandbytes
        return f"{str(getattr(weight, 'quant_type', '4-bit')).upper()}", ""
    if kind == "Linear8bitLt":
        return "INT8", "INT8 a row, dynamic, outliers in 16 bits"
    dynamic = re.search(r"(Int8|Float8)DynamicActivation", method)  # torchao
    return method, f"{dynamic[1].upper()} a row, dynamic" if dynamic else ""


def _arguments(arguments: Any) -> str:
    """compressed-tensors' settings in words: "INT4 g128", "FP8 a token, dynamic"; "" for none."""
    if arguments is None:
        return ""
    kind = "INT" if str(getattr(arguments.type, "value", arguments.type)) == "int" else "FP"
    strategy = str(getattr(arguments.strategy, "value", arguments.strategy))
    each = {"channel": " a channel", "tensor": " a tensor", "token": " a token"}
    if kind == "FP" and arguments.num_bits == 4:
        kind = "NVFP" if strategy == "tensor_group" else "MXFP"
    words = f"{kind}{arguments.num_bits}"
    words += f" g{arguments.group_size}" if "group" in strategy else each.get(strategy, f" {strategy}")
    words += ", dynamic" if arguments.dynamic else ""
    return words if arguments.symmetric else f"{words}, asymmetric"
