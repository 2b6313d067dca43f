"""Tensors that stay in their files until they are read: whole, or some of their rows.

Files are read into memory that is allocated for the tensor, not mapped: what was read is counted as what it is, and a
layer that is let go of is gone. Only safetensors and GGUF files can be read so; PyTorch's own are pickles.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from serve.errors import LoadFailed, ServeError

_LARGEST_HEADER = 100 << 20  # bytes; safetensors' own limit
_READ = 1 << 30  # bytes of one call: Linux transfers at most 2 GiB
_ROWS_AT_ONCE = 1 << 22  # elements dequantized together: numpy's intermediate arrays are several times as large
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class OpenFile:
    """A file that is read in pieces by several threads. counted: gets the bytes of each read."""

    def __init__(self, path: Path, counted: Callable[[int], None]) -> None:
        self.path = path
        self._counted = counted
        self._descriptor: int | None = None
        self._lock = threading.Lock()

    def into(self, tensor: torch.Tensor, offset: int) -> None:
        """Fill a contiguous CPU tensor with the bytes from `offset` on. Raises ServeError where the file has fewer."""
        size = tensor.numel() * tensor.element_size()
        if not size:
            return
        view = memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
        done = 0
        while done < size:
            try:
                got = os.preadv(self._open(), [view[done : done + _READ]], offset + done)
            except OSError as error:
                raise ServeError(f"'{self.path}' cannot be read ({error.strerror}): check the disk") from error
            if not got:
                raise ServeError(
                    f"'{self.path}' ends before byte {offset + size:,}: it was cut while it was being read; get it "
                    f"again "
                    "and run the same command to resume"
                )
            done += got
        self._counted(size)

    def _open(self) -> int:
        with self._lock:
            if self._descriptor is None:
                self._descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            return self._descriptor

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file. It has what transformers' loader asks of one that is not read yet."""

    file: OpenFile
    kind: str  # as safetensors names dtypes
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype in the file."""
        return _DTYPES[self.kind]

    @property
    def file_bytes(self) -> int:
        """Bytes in the file."""
        return _elements(self.shape) * self.dtype.itemsize

    def get_shape(self) -> list[int]:
        """The shape, as safetensors' own slices have it."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """The dtype's name, as safetensors' own slices have it."""
        return self.kind

    def __getitem__(self, _: Any) -> torch.Tensor:
        """The whole tensor, read now."""
        out = torch.empty(self.shape, dtype=self.dtype)
        self.file.into(out, self.offset)
        return out

    def part(self, start: int, stop: int) -> StoredTensor:
        """Rows [start, stop) of the first dimension, not read yet."""
        row = _elements(self.shape[1:]) * self.dtype.itemsize
        return replace(self, shape=(stop - start, *self.shape[1:]), offset=self.offset + start * row)

    def rows(self, index: Sequence[int]) -> torch.Tensor:
        """The rows of these ascending numbers; neighbours are read together."""
        out = torch.empty((len(index), *self.shape[1:]), dtype=self.dtype)
        row = _elements(self.shape[1:]) * self.dtype.itemsize
        for at, start, count in _runs(index):
            self.file.into(out[at : at + count], self.offset + start * row)
        return out


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file, dequantized to float32 as it is read. process: what transformers does to it by name.

    by_rows: whether that is nothing, so that rows can be read apart.
    """

    file: OpenFile
    kind: Any  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    row_bytes: int
    process: Callable[[Any], Any]
    by_rows: bool
    dtype: torch.dtype = torch.float32

    @property
    def file_bytes(self) -> int:
        """Bytes in the file."""
        return self.row_bytes * _elements(self.shape[:-1])

    def __getitem__(self, _: Any) -> torch.Tensor:
        """The whole tensor, read and dequantized now."""
        rows = self._dequantized(0, _elements(self.shape[:-1]))
        made = self.process(rows.reshape(self.shape).numpy())
        return torch.from_numpy(made).contiguous()

    def part(self, start: int, stop: int) -> GgufTensor:
        """Rows [start, stop) of the first dimension, not read yet."""
        below = _elements(self.shape[1:-1]) * self.row_bytes if len(self.shape) > 1 else self.row_bytes
        return replace(self, shape=(stop - start, *self.shape[1:]), offset=self.offset + start * below)

    def rows(self, index: Sequence[int]) -> torch.Tensor:
        """The rows of these ascending numbers."""
        out = torch.empty((len(index), self.shape[-1]))
        for at, start, count in _runs(index):
            out[at : at + count] = self._dequantized(start, count)
        return out

    def _dequantized(self, start: int, count: int) -> torch.Tensor:
        from gguf import dequantize

        out = torch.empty((count, self.shape[-1]))
        step = max(1, _ROWS_AT_ONCE // max(1, self.shape[-1]))
        for low in range(0, count, step):
            part = out[low : low + step]
            raw = torch.empty((part.shape[0], self.row_bytes), dtype=torch.uint8)
            self.file.into(raw, self.offset + (start + low) * self.row_bytes)
            part.copy_(torch.from_numpy(dequantize(raw.numpy(), self.kind).reshape(part.shape)))
        return out


Stored = StoredTensor | GgufTensor


def stored_tensors(files: Sequence[Path], counted: Callable[[int], None]) -> dict[str, StoredTensor]:
    """The tensors of safetensors files by name, none of them read.

    Raises LoadFailed naming a file that is missing, cut, or of another format.
    """
    found: dict[str, StoredTensor] = {}
    for path in files:
        if path.suffix != ".safetensors":
            raise LoadFailed(
                f"'{path}' is a pickle, whose layers cannot be read one by one: save the model as safetensors "
                "(save_pretrained does)"
            )
        found.update(_of_file(path, counted))
    return found


def _of_file(path: Path, counted: Callable[[int], None]) -> Iterator[tuple[str, StoredTensor]]:
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= min(_LARGEST_HEADER, size):
                raise ValueError
            header: Mapping[str, Any] = json.loads(stream.read(length))
        file = OpenFile(path, counted)
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        tensors = [
            (name, StoredTensor(file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0]))
            for name, entry in entries
        ]
        end = 8 + length + max((int(entry["data_offsets"][1]) for _, entry in entries), default=0)
    except FileNotFoundError as error:
        raise LoadFailed(f"'{path}' is missing, and the checkpoint's index names it: copy it there") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise LoadFailed(f"'{path}' is not a safetensors file, or was cut: get it again") from error
    if end > size:
        raise LoadFailed(f"'{path}' has {size:,} bytes and its header describes {end:,}: it was cut; get it again")
    unknown = next((tensor.kind for _, tensor in tensors if tensor.kind not in _DTYPES), None)
    if unknown is not None:
        raise LoadFailed(f"'{path}' has tensors of type {unknown}, which cannot be streamed: load the model whole")
    yield from tensors


def _elements(shape: Sequence[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def _runs(index: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of neighbours in ascending numbers: (place of the first, its number, how many)."""
    at = 0
    while at < len(index):
        count = 1
        while at + count < len(index) and index[at + count] == index[at] + count:
            count += 1
        yield at, index[at], count
        at += count
