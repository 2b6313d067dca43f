"""The output head of a trace of hidden states, read with numpy: hidden rows to logits, without torch or a model.

The file is safetensors, as `serve/models/headfile.py` writes it. It is mapped, so that a check of a few rows reads the
weight once and keeps no copy of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evalgate.traces.batch import Float32, Float64, widened
from evalgate.traces.layout import broken

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMAT = 1
_KEY = "evalgate"  # of the file's metadata
_MOST_HEADER = 1 << 24  # bytes
_BLOCK = 1 << 24  # numbers of the weight that are widened together: 64 MiB
_KINDS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


@dataclass(frozen=True)
class LastNorm:
    """The norm that the body ends with. gain, bias [size] float64. kind: rms, or layer, which subtracts the mean."""

    kind: str
    eps: float
    gain: Float64
    bias: Float64

    def apply(self, rows: Float64) -> Float64:
        """Rows [n, size] after the norm."""
        if self.kind == "layer":
            rows = rows - rows.mean(axis=1, keepdims=True)
        scaled: Float64 = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + self.eps)
        return scaled * self.gain + self.bias

    def undo(self, rows: Float64) -> Float64:
        """The normed rows that this norm turned into `rows`: what it was applied to was itself its outcome.

        The norm leaves out a row's scale (and mean); that the row before was normed too gives them back.
        """
        gain = np.where(np.abs(self.gain) < 1e-12, 1e-12, self.gain)
        direction = (rows - self.bias) / gain
        if self.kind == "rms":
            scale = 1 / np.sqrt(((direction / gain) ** 2).mean(axis=1, keepdims=True))
            return np.asarray(direction * scale)
        per = 1 / gain
        a = direction * per - (direction * per).mean(axis=1, keepdims=True) / per.mean() * per
        b = (self.bias * per).mean() / per.mean() * per - self.bias * per
        aa, ab = (a * a).mean(axis=1, keepdims=True), (a * b).mean(axis=1, keepdims=True)
        root = np.sqrt(np.maximum(ab**2 - aa * ((b * b).mean() - 1), 0))
        scale = (-ab + root) / aa
        mean = ((self.bias * per).mean() - scale * (direction * per).mean(axis=1, keepdims=True)) / per.mean()
        return np.asarray(scale * direction + mean)


@dataclass(frozen=True)
class OutputHead:
    """weight [vocabulary, size], float32, float16 or the bits of bfloat16. bias [vocabulary] float32, or None."""

    weight: NDArray[Any]
    bias: Float32 | None
    scale: float
    softcap: float | None
    norm: LastNorm | None

    def logits(self, rows: Float32) -> Float32:
        """Logits [n, vocabulary] of rows [n, size]."""
        vocabulary, size = self.weight.shape
        out = np.empty((len(rows), vocabulary), dtype=np.float32)
        step = max(1, _BLOCK // size)
        for low in range(0, vocabulary, step):
            out[:, low : low + step] = rows @ widened(self.weight[low : low + step]).T
        if self.bias is not None:
            out += self.bias
        if self.scale != 1.0:
            out *= np.float32(self.scale)
        if self.softcap is not None:
            out = np.tanh(out / np.float32(self.softcap)) * np.float32(self.softcap)
        return out

    def nll(self, rows: Float32, tokens: NDArray[np.int32]) -> Float64:
        """-log prob [n] of one token a row, nats."""
        logits = self.logits(rows).astype(np.float64)
        peak = logits.max(axis=1, keepdims=True)
        lse = peak[:, 0] + np.log(np.exp(logits - peak).sum(axis=1))
        return np.asarray(lse - logits[np.arange(len(rows)), tokens])


def read_output_head(path: Path, *, vocab_size: int, size: int) -> OutputHead:
    """The head in a file. Raises InputError where it is not one, or not of that vocabulary and size."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MOST_HEADER:
                raise ValueError("its header is too long")
            header = json.loads(file.read(length))
        mapped = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + length)
        facts = json.loads(header["__metadata__"][_KEY])
        if facts["format"] != FORMAT:
            raise ValueError(f"its format is {facts['format']}, and this evalgate reads {FORMAT}")

        def tensor(name: str) -> NDArray[Any] | None:
            if name not in header:
                return None
            start, end = header[name]["data_offsets"]
            kind = _KINDS[header[name]["dtype"]]
            found: NDArray[Any] = mapped[start:end].view(kind).reshape(header[name]["shape"])
            return found

        weight, bias = tensor("weight"), tensor("bias")
        gain, shift = tensor("norm.gain"), tensor("norm.bias")
        norm = None
        if facts["norm"] is not None and gain is not None and shift is not None:
            kind, eps = str(facts["norm"]["kind"]), float(facts["norm"]["eps"])
            norm = LastNorm(kind, eps, gain.astype(np.float64), shift.astype(np.float64))
        scale, softcap = float(facts["scale"]), facts["softcap"]
        found = OutputHead(
            np.asarray(weight),
            None if bias is None else widened(bias),
            scale,
            None if softcap is None else float(softcap),
            norm,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise broken(path, f"is not an output head ({error})") from error
    if found.weight.shape != (vocab_size, size):
        raise broken(path, f"is a head of {found.weight.shape} and the trace's is ({vocab_size}, {size})")
    if found.bias is not None and found.bias.shape != (vocab_size,):
        raise broken(path, "has a bias of another length than its vocabulary")
    return found
