"""Conversions to the block formats of GGUF files: quantized by llama.cpp's own code, unpacked by the `gguf` package."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from serve.errors import LoadFailed
from serve.models.conversions._rounding import Rounding

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_PLAIN = "F16"  # where not even the fallback's blocks fit, as llama.cpp has it


class Blocks(Rounding):
    """A type of GGUF, without an importance matrix. fallback: the type of rows that are not whole blocks of it."""

    def __init__(self, type_name: str, *, fallback: str | None = None) -> None:
        self.type_name, self._fallback = type_name, fallback

    @property
    def name(self) -> str:
        """See `Rounding`."""
        return self.type_name.lower()

    @property
    def grid(self) -> str:
        """See `Rounding`."""
        return f"{self.type_name} (llama.cpp's quantizer, no importance matrix)"

    @property
    def bits(self) -> str:
        """See `Rounding`."""
        return f"as blocks of {self.type_name}"

    def round_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Conversion`. Raises LoadFailed where the packages of GGUF are not installed."""
        chosen = self._type(rows.shape[1])
        if chosen == _PLAIN:
            return rows.half().float()
        values = rows.detach().cpu().contiguous().numpy()
        return torch.from_numpy(unpacked(packed(values, chosen), chosen)).to(rows.device)

    def size(self, rows: int, columns: int) -> dict[str, int]:
        """See `Conversion`."""
        chosen = self._type(columns)
        if chosen == _PLAIN:
            return {_PLAIN: 2 * rows * columns}
        block, size = _sizes(chosen)
        return {chosen: rows * columns // block * size}

    def note(self, rows: int, columns: int) -> str:
        """Rows that are not whole blocks are in another type."""
        chosen = self._type(columns)
        return "" if chosen == self.type_name else f"in {chosen}, for their rows are not whole blocks of {self.name}"

    def _type(self, columns: int) -> str:
        for chosen in filter(None, (self.type_name, self._fallback)):
            if columns % _sizes(chosen)[0] == 0:
                return chosen
        return _PLAIN


def packed(rows: NDArray[np.float32], type_name: str) -> NDArray[np.uint8]:
    """Rows as blocks of a GGUF type, [..., bytes], quantized by llama.cpp without an importance matrix.

    Where its library is not installed, the `gguf` package packs the types that it can, to the same bytes.
    Raises LoadFailed where neither can.
    """
    import numpy as np

    gguf = _gguf()
    number = gguf.GGMLQuantizationType[type_name]
    pack = _llama_cpp()
    if pack is None:
        try:
            blocks: NDArray[np.uint8] = gguf.quants.quantize(rows, number)
        except NotImplementedError:
            raise LoadFailed(f"{type_name} needs llama.cpp's quantizer: pip install 'evalgate-lm[gguf]'") from None
        return blocks
    block, size = _sizes(type_name)
    columns = rows.shape[-1]
    count = rows.size // columns
    flat = np.ascontiguousarray(rows.reshape(count, columns), dtype=np.float32)
    made = np.zeros((count, columns // block * size), dtype=np.uint8)
    written = pack(int(number), flat.ctypes.data, made.ctypes.data, 0, count, columns, None)
    if written != made.nbytes:
        raise LoadFailed(f"llama.cpp wrote {written} bytes of {type_name} where {made.nbytes} were due")
    return made.reshape(*rows.shape[:-1], -1)


def unpacked(blocks: NDArray[np.uint8], type_name: str) -> NDArray[np.float32]:
    """The values of blocks, float32."""
    gguf = _gguf()
    values: NDArray[np.float32] = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type_name])
    return values


@cache
def _sizes(type_name: str) -> tuple[int, int]:
    """Weights and bytes of one block."""
    gguf = _gguf()
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    return int(block), int(size)


def _gguf() -> Any:
    try:
        return import_module("gguf")
    except ImportError as error:
        raise LoadFailed("conversions to GGUF types need the gguf package: pip install 'evalgate-lm[gguf]'") from error


@cache
def _llama_cpp() -> Any | None:
    """llama.cpp's quantizer of rows, from the `xllamacpp` wheel; None where that is not installed."""
    try:
        library = ctypes.CDLL(import_module("xllamacpp.xllamacpp").__file__)
        pack = library.ggml_quantize_chunk
    except (ImportError, OSError, AttributeError):
        return None
    pack.restype = ctypes.c_size_t
    pack.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    return pack
