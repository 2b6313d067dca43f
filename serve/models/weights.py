"""How large a model's weights are: counted in its files, or what a conversion on load would take if it were stored.

Parameters are those of the architecture, tied ones once, however many bits each has. Bytes are those of tensor data:
headers, tokenizers and configurations are left out, scales and zero points of a quantization are in. So bits per weight
(8 * bytes / parameters) compare across formats. Nothing here imports torch until a model is counted.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import mmap
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.models.notes import read_note, write_note

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of GGUF's other value types
_LARGEST_HEADER = 100 << 20  # bytes; safetensors' own limit
IN_GGUF = "tensors of the GGUF file"
IN_SAFETENSORS = "tensors of the safetensors files"
IN_FILES = "weight files"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file. type: as the format names it. elements: numbers, of packed weights those that hold them.
    size: bytes.

    file, offset: where its data begin; of a GGUF file they are not known.
    """

    name: str
    type: str
    elements: int
    size: int
    dimensions: int
    file: Path | None = None
    offset: int = 0

    def data(self) -> bytes:
        """Its bytes. Raises ValueError where it is not known where they are."""
        if self.file is None:
            raise ValueError(f"where {self.name} is was not read")
        with self.file.open("rb") as stream:
            stream.seek(self.offset)
            return stream.read(self.size)


@dataclass(frozen=True)
class Weights:
    """The size of a model's weights.

    parameters: of the architecture, tied ones once. bytes: of tensor data. counted: what was counted, as a phrase.
    types: bytes by type, the largest first: {"Q4_K": 120000, "F32": 9000}.
    """

    parameters: int
    bytes: int
    counted: str
    types: Mapping[str, int]

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return 8 * self.bytes / self.parameters

    def document(self) -> dict[str, Any]:
        """The size as /v1/models shows it."""
        return {
            "parameters": self.parameters,
            "bytes": self.bytes,
            "counted": self.counted,
            "types": dict(self.types),
        }


def of_files(files: Sequence[Path], *, parameters: int) -> Weights | None:
    """The size of weights as files hold them; None where their headers cannot be read.

    files: a GGUF file, or the weight files of a checkpoint.
    """
    try:
        if len(files) == 1 and files[0].suffix == ".gguf":
            counted, types = IN_GGUF, gguf_types(files[0])
        elif files and all(file.suffix == ".safetensors" for file in files):
            counted, types = IN_SAFETENSORS, _summed(_safetensors_types(file) for file in files)
        else:
            counted, types = IN_FILES, {"": sum(file.stat().st_size for file in files)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # the model has loaded: how large it is says nothing about whether it is right
    return sized(types, parameters=parameters, counted=counted)


def remembered(files: Sequence[Path], *, parameters: int, digest: str, cache: Path) -> Weights | None:
    """`of_files`, remembered under `cache`/sizes for as long as the files are the same. digest: hash of their contents.

    The header of a GGUF file holds its vocabulary, which takes long to step over.
    """
    note, key = cache / "sizes" / f"{digest}.json", [digest, parameters]
    known = read_note(note, key)
    try:
        return sized(
            {str(k): int(v) for k, v in known["types"].items()}, parameters=parameters, counted=known["counted"]
        )
    except (TypeError, KeyError, ValueError, AttributeError):
        found = of_files(files, parameters=parameters)
    if found is not None:
        with contextlib.suppress(OSError):  # a cache that cannot be written costs time, nothing else
            write_note(note, key, {"types": dict(found.types), "counted": found.counted})
    return found


def remembered_tensors(file: Path, *, digest: str, cache: Path) -> list[StoredTensor]:
    """`gguf_tensors`, remembered under `cache`/sizes as `remembered` does. Raises as `gguf_tensors`."""
    note, key = cache / "sizes" / f"{digest}-tensors.json", [digest, "tensors"]
    try:
        return [StoredTensor(*one) for one in read_note(note, key)]
    except TypeError:  # nothing was noted, or something else
        found = gguf_tensors(file)
    with contextlib.suppress(OSError):
        write_note(note, key, [[one.name, one.type, one.elements, one.size, one.dimensions] for one in found])
    return found


def sized(types: Mapping[str, int], *, parameters: int, counted: str) -> Weights:
    """The size of weights that take these bytes by type."""
    ordered = dict(sorted(((name, n) for name, n in types.items() if n), key=lambda item: (-item[1], item[0])))
    return Weights(parameters, sum(ordered.values()), counted, ordered)


def gguf_types(path: Path) -> dict[str, int]:
    """Bytes of tensor data by type of a GGUF file, from its header alone.

    gguf.GGUFReader makes an array of every vocabulary entry on the way, which takes seconds.
    Raises ValueError or KeyError for a header that cannot be read.
    """
    return _summed({tensor.type: tensor.size} for tensor in gguf_tensors(path))


def gguf_elements(path: Path) -> int:
    """How many numbers the tensors of a GGUF file hold. Raises as `gguf_types`."""
    return sum(elements for _, _, elements, _ in _gguf_tensors(path))


def gguf_tensors(path: Path) -> list[StoredTensor]:
    """Every tensor of a GGUF file. Raises as `gguf_types`."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    found = []
    for name, number, elements, dimensions in _gguf_tensors(path):
        kind = GGMLQuantizationType(number)
        block, size = GGML_QUANT_SIZES[kind]
        found.append(StoredTensor(name, kind.name, elements, elements // block * size, dimensions))
    return found


def safetensors_tensors(files: Sequence[Path]) -> list[StoredTensor]:
    """Every tensor of safetensors files. Raises OSError, ValueError or KeyError for a header that cannot be read."""
    found = []
    for path in files:
        header, start = _safetensors_header(path)
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = map(int, entry["data_offsets"])
                shape = [int(n) for n in entry["shape"]]
                size, place = end - begin, start + begin
                found.append(StoredTensor(name, entry["dtype"], math.prod(shape), size, len(shape), path, place))
    return found


def _gguf_tensors(path: Path) -> list[tuple[str, int, int, int]]:
    """Name, type, number of elements and of dimensions of every tensor."""
    try:
        return _read_gguf_tensors(path)
    except struct.error as error:
        raise ValueError("the header is cut") from error


def _read_gguf_tensors(path: Path) -> list[tuple[str, int, int, int]]:
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
        if view[:4] != _MAGIC:
            raise ValueError("not a GGUF file")
        version, tensors, fields = struct.unpack_from("<IQQ", view, 4)
        if version not in _VERSIONS:
            raise ValueError(f"GGUF version {version}")
        at = 24
        for _ in range(fields):
            _, at = _gguf_string(view, at)
            (kind,) = struct.unpack_from("<I", view, at)
            at = _after_value(view, at + 4, kind)
        found = []
        for _ in range(tensors):
            name, at = _gguf_string(view, at)
            (dimensions,) = struct.unpack_from("<I", view, at)
            shape = struct.unpack_from(f"<{dimensions}Q", view, at + 4)
            (kind,) = struct.unpack_from("<I", view, at + 4 + 8 * dimensions)
            at += 4 + 8 * dimensions + 4 + 8  # the last 8 are the offset
            elements = 1
            for extent in shape:
                elements *= extent
            found.append((name, kind, elements, dimensions))
        return found


def _gguf_string(view: mmap.mmap, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", view, at)
    end = at + 8 + length
    return view[at + 8 : end].decode(errors="replace"), end


def _after_value(view: mmap.mmap, at: int, kind: int) -> int:
    """Where the value of a metadata field ends."""
    if kind == _STRING:
        (length,) = struct.unpack_from("<Q", view, at)
        return int(at + 8 + length)
    if kind != _ARRAY:
        return at + _WIDTHS[kind]
    inner, count = struct.unpack_from("<IQ", view, at)
    at += 12
    if inner in _WIDTHS:
        return int(at + count * _WIDTHS[inner])
    for _ in range(count):
        at = _after_value(view, at, inner)
    return at


def _safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, and where the data begin."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > _LARGEST_HEADER:
            raise ValueError("not a safetensors file")
        header = json.loads(stream.read(length))
    if not isinstance(header, dict):
        raise ValueError("not a safetensors file")
    return header, 8 + length


def _safetensors_types(path: Path) -> dict[str, int]:
    return _summed({tensor.type: tensor.size} for tensor in safetensors_tensors([path]))


_FLOATS = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}


def float_elements(files: Sequence[Path]) -> int:
    """Numbers of the unpacked floating-point tensors of safetensors files. Raises as reading a header does."""
    types = _summed(_safetensors_types(file) for file in files)
    return sum(types.get(kind, 0) // size for kind, size in _FLOATS.items())


def other_bytes(files: Sequence[Path]) -> int:
    """Bytes of all other tensors of safetensors files: packed weights. Raises as `float_elements`."""
    types = _summed(_safetensors_types(file) for file in files)
    return sum(size for kind, size in types.items() if kind not in _FLOATS)


def _summed(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in parts:
        for name, size in part.items():
            found[name] = found.get(name, 0) + size
    return found


def parameters_of(model: Any, *, quantized: bool) -> int:
    """Parameters of a loaded model's architecture, tied ones once."""
    return sum(parameter.numel() for parameter in plain(model, quantized=quantized).parameters())


def plain(model: Any, *, quantized: bool) -> Any:
    """The model itself; of a quantized one its architecture without quantization, and without memory.

    Packed tensors do not say how many weights they stand for.
    """
    if not quantized:
        return model
    import torch

    config = copy.deepcopy(model.config)
    for holder in (config, config.get_text_config()):
        if hasattr(holder, "quantization_config"):
            del holder.quantization_config
    with torch.device("meta"):
        return type(model)(config)
