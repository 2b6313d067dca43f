"""An output head as a file: what turns hidden rows into logits, and nothing of the body below it.

A safetensors file of `weight` [vocabulary, size], `bias` [vocabulary] where there is one, and the parameters of the
norm that the body ends with, `norm.gain` and `norm.bias` [size], where it was recognised. The metadata key `evalgate`
holds the rest as JSON: the scale and the soft cap of the logits, the dtype in which the weight is multiplied, and the
norm's kind. The same head always gives the same bytes, so that its SHA-256 names it.

A float32 weight that fits bfloat16 without rounding (a 16-bit checkpoint, widened) is written as that, and widened when
it is read. The norm is for whoever checks a recording: hidden rows are taken after it, and are not normed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from serve.errors import LoadFailed

FORMAT = 1
KEY = "evalgate"
_ROWS = 4096  # of a weight that are looked at together
_FIT = 1e-3  # how far a norm may be from its two parameters, relative to its largest value


@dataclass(frozen=True)
class Norm:
    """The last norm of a body: gain and bias [size] float32. kind: rms, or layer, which subtracts the mean too."""

    kind: str
    eps: float
    gain: torch.Tensor
    bias: torch.Tensor


class HeadOnly(torch.nn.Module):
    """A causal language model without its body: what `serve.engine.head.Head` reads of a model, and no more."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, scale: float = 1.0, softcap: float | None = None
    ) -> None:
        super().__init__()
        linear = torch.nn.Linear(1, 1, bias=bias is not None)
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            linear.bias = torch.nn.Parameter(bias, requires_grad=False)
        self.linear = linear
        self.config = _Config(scale, softcap)

    def get_output_embeddings(self) -> torch.nn.Linear:
        """The head."""
        return self.linear


@dataclass(frozen=True)
class _Config:
    logit_scale: float
    final_logit_softcapping: float | None

    def get_text_config(self) -> _Config:
        return self


def write_head(
    path: Path,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    norm: Norm | None = None,
) -> None:
    """Write a head's file, whole or not at all. Raises OSError."""
    from safetensors.torch import save_file

    stored = _narrowed(weight)
    tensors = {"weight": stored, **({} if bias is None else {"bias": bias})}
    facts: dict[str, Any] = {
        "format": FORMAT,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "scale": scale,
        "softcap": softcap,
        "norm": None if norm is None else {"kind": norm.kind, "eps": norm.eps},
    }
    if norm is not None:
        tensors |= {"norm.gain": norm.gain, "norm.bias": norm.bias}
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    if len({tensor.data_ptr() for tensor in plain.values()}) < len(plain):
        plain = {name: tensor.clone() for name, tensor in plain.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".evalgate.", suffix=".tmp") as scratch:
        made = Path(scratch) / "head"
        save_file(plain, made, metadata={KEY: json.dumps(facts, sort_keys=True)})
        with made.open("rb") as stream:
            os.fsync(stream.fileno())
        made.replace(path)


def read_head(path: Path, *, device: str = "cpu") -> HeadOnly:
    """The head of a file, on a device, in the dtype in which it was multiplied.

    Raises LoadFailed where the file is missing or is not one of a head.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            facts = json.loads((file.metadata() or {})[KEY])
            names = set(file.keys())
            weight = file.get_tensor("weight")
            bias = file.get_tensor("bias") if "bias" in names else None
        if facts["format"] != FORMAT:
            raise LoadFailed(f"the output head in {path} has format {facts['format']}, and this server reads {FORMAT}")
        dtype = getattr(torch, str(facts["dtype"]))
        scale, softcap = float(facts["scale"]), facts["softcap"]
        softcap = None if softcap is None else float(softcap)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadFailed(f"there is no output head in {path} ({type(error).__name__}: {error})") from error
    if not isinstance(dtype, torch.dtype) or weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise LoadFailed(f"the output head in {path} has a weight or a bias of a shape that cannot be")
    # a copy: products may differ in their last bits where a matrix begins at an odd address of a mapped file
    weight = weight.to(device=device, dtype=dtype, copy=True)
    bias = None if bias is None else bias.to(device=device, copy=True)
    return HeadOnly(weight, bias, scale=scale, softcap=softcap)


def digest_of(path: Path) -> str:
    """SHA-256 of a file in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fitted_norm(module: Any, size: int, *, dtype: torch.dtype, device: torch.device) -> Norm | None:
    """A module as a norm of rows of that size; None where it is not one that a gain and a bias describe.

    Found by what it does to a few rows, so that every class of norm is read alike (Gemma's adds 1 to its weight).
    """
    ones = torch.ones(size, dtype=torch.float32)
    sign = torch.where(torch.arange(size) % 2 == 0, ones, -ones)  # mean 0 and variance 1, but for an odd size
    if size % 2:
        sign[-1] = 0.0
        sign *= (size / (size - 1)) ** 0.5
    eps = next(
        (float(getattr(module, name)) for name in ("eps", "variance_epsilon", "epsilon") if _has(module, name)), 0
    )
    noise = torch.randn((4, size), generator=torch.Generator().manual_seed(7))

    def of(rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = module(rows.to(device=device, dtype=dtype))
        return out.float().cpu()

    try:
        bias = of(torch.zeros(1, size))[0]
        gain = (of(sign[None])[0] - bias) * (1 + eps) ** 0.5
        gain = torch.where(sign == 0, torch.zeros_like(gain), gain / torch.where(sign == 0, ones, sign))
        if size % 2:  # the one entry that the pattern leaves at 0
            other = sign.roll(1)
            gain[-1] = ((of(other[None])[0] - bias) * (1 + eps) ** 0.5 / other)[-1]
        for kind in ("rms", "layer"):
            norm = Norm(kind, eps, gain.contiguous(), bias.contiguous())
            given = noise.to(dtype).float() + 0.5
            wanted = of(given)
            limit = max(_FIT, 4 * torch.finfo(dtype).eps) * float(wanted.abs().max().clamp(min=1e-6))
            if float((apply_norm(norm, given) - wanted).abs().max()) <= limit:
                return norm
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return None
    return None


def apply_norm(norm: Norm, rows: torch.Tensor) -> torch.Tensor:
    """Rows [n, size] float32 after the norm."""
    if norm.kind == "layer":
        rows = rows - rows.mean(1, keepdim=True)
    scaled = rows * torch.rsqrt(rows.pow(2).mean(1, keepdim=True) + norm.eps)
    return scaled * norm.gain + norm.bias


def _has(module: Any, name: str) -> bool:
    return isinstance(getattr(module, name, None), float)


def _narrowed(weight: torch.Tensor) -> torch.Tensor:
    """The weight in bfloat16 where that rounds nothing, else as it is."""
    if weight.dtype != torch.float32:
        return weight
    narrow = torch.empty(weight.shape, dtype=torch.bfloat16)
    for low in range(0, len(weight), _ROWS):
        rows = weight[low : low + _ROWS].detach().cpu()
        block = rows.bfloat16()
        if not torch.equal(block.float().view(torch.int32), rows.contiguous().view(torch.int32)):
            return weight
        narrow[low : low + _ROWS] = block
    return narrow
