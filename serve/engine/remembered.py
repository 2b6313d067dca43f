"""The load-time check, remembered: its outcome is kept for as long as nothing it depends on changes.

It takes seconds where loading takes less. What it depends on is the key: the weights and the vocabulary by content, the
configuration, how the model was loaded, our own code, the versions of what computes, and the machine. A remembered
outcome is tried before it is believed: a few tokens run through the remembered runner and head must give the
log-probabilities that they gave then. Where they do not, or the note is damaged, the model is checked as if for the
first time.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import serve
from serve.engine.head import AnyHead, Head, OwnHead
from serve.engine.interface import select
from serve.engine.runner import KINDS, Runner, UnsupportedModel, make_runner
from serve.engine.selfcheck import Checked, prepare
from serve.engine.tilecheck import run_alone
from serve.engine.tiled import WIDE, TiledRunner
from serve.models.cache import cache_root
from serve.models.hashing import combine, hash_file
from serve.models.load import LoadedModel
from serve.models.notes import read_note, write_note
from serve.models.quiet import quiet

_HEADS: dict[str, Callable[[Any], AnyHead]] = {"Head": Head, "OwnHead": OwnHead}
_KERNELS = ("torch", "transformers", "accelerate", "torchao", "bitsandbytes", "compressed-tensors", "numba", "triton")
_SWITCHES = (
    "ATEN_",
    "CUBLAS_",
    "CUDA_",
    "DNNL_",
    "EVALGATE_KERNELS",
    "KMP_",
    "MKL_",
    "NVIDIA_",
    "OMP_",
    "ONEDNN_",
    "PYTORCH_",
    "TORCH_",
)
_PULSE = 5  # tokens
_LIKELIEST = 10
_TOLERANCE = {torch.float32: 2e-3}  # nats, as in selfcheck: between two runs of one kernel there is hardly any
_HALF_TOLERANCE = 0.1


def checked(loaded: LoadedModel, *, own_head: bool = False, deterministic: bool = False) -> Checked:
    """`selfcheck.prepare`, or what it said of the same model on the same machine before.

    Raises LoadFailed as `prepare` does. A failure is never remembered.
    """
    key = key_of(loaded, own_head=own_head, deterministic=deterministic)
    note = cache_root() / "checks" / f"{combine([repr(key)])}.json"
    before = loaded.model.config._attn_implementation
    known = _recalled(loaded, read_note(note, key))
    if known is not None:
        return known
    if loaded.model.config._attn_implementation != before:
        select(loaded.model, before)  # the full check compares with the model's own forward
    made = prepare(loaded, own_head=own_head, deterministic=deterministic)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, nothing else
        write_note(note, key, _outcome(loaded, made))
    return made


def _outcome(loaded: LoadedModel, made: Checked) -> dict[str, Any]:
    ids, logprobs = _pulse(loaded, made.runner, made.head)
    return {
        "head": type(made.head).__name__,
        "backend": made.backend,
        "deviation": made.deviation,
        "kl_floor": made.kl_floor,
        "ids": ids,
        "logprobs": logprobs,
    }


def _recalled(loaded: LoadedModel, value: Any) -> Checked | None:
    """The outcome that a note holds, where it still gives the same numbers."""
    try:
        backend, numbers = str(value["backend"]), (float(value["deviation"]), float(value["kl_floor"]))
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            return None
        head = _HEADS[value["head"]](loaded.model)
        kind = next(kind for kind in KINDS if backend.startswith(kind))
        runner = make_runner(kind, loaded)
        if isinstance(runner, TiledRunner) and backend == runner.name:
            runner.wide = WIDE
        ids, logprobs = _pulse(loaded, runner, head, ids=[int(i) for i in value["ids"]])
        limit = _TOLERANCE.get(loaded.model.dtype, _HALF_TOLERANCE)
        same = len(ids) == len(value["logprobs"]) and all(
            abs(now - float(then)) <= limit for now, then in zip(logprobs, value["logprobs"], strict=True)
        )
    except (UnsupportedModel, RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError, StopIteration):
        return None
    return Checked(runner, head, backend, *numbers) if same and ids else None


def _pulse(
    loaded: LoadedModel, runner: Runner, head: AnyHead, *, ids: list[int] | None = None
) -> tuple[list[int], list[float]]:
    """The likeliest ids after a few tokens, or the given ones, and their log-probabilities (nats)."""
    top = min(loaded.vocab_size, len(loaded.tokenizer) or loaded.vocab_size)
    tokens = [(7919 * (place + 1)) % top for place in range(min(_PULSE, loaded.context_length))]
    with quiet(), torch.inference_mode():
        row = torch.log_softmax(head.logits(run_alone(runner, tokens)[-1:]), dim=-1)[0]
        if ids is None:
            ids = row.topk(min(_LIKELIEST, row.shape[0])).indices.tolist()
        return ids, row[ids].tolist()


def key_of(loaded: LoadedModel, *, own_head: bool, deterministic: bool) -> list[Any]:
    """Everything that the check's outcome depends on, as a JSON value."""
    config = loaded.model.config
    device = loaded.device
    return [
        *(loaded.weights_hash, loaded.vocabulary_hash, loaded.vocab_size, len(loaded.tokenizer)),
        *(loaded.dtype, loaded.compute_dtype, loaded.load_mode, loaded.scheme, loaded.context_length),
        combine([type(loaded.model).__qualname__, config.to_json_string(use_diff=False)]),
        *(str(config._attn_implementation), own_head, deterministic),
        *circumstances(device),
    ]


def circumstances(device: torch.device) -> list[Any]:
    """What the bits of a computation depend on besides the model and its input, as a JSON value: machine and code."""
    return [
        *(str(device), _accelerator(device), torch.get_num_threads(), torch.get_float32_matmul_precision()),
        *(torch.backends.cpu.get_cpu_capability(), _processor()),
        *([name, _version(name)] for name in _KERNELS),
        sorted([name, value] for name, value in os.environ.items() if name.startswith(_SWITCHES)),
        _own_code(),
    ]


def _accelerator(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    return f"{name} {capability} {torch.version.cuda} {torch.backends.cuda.matmul.allow_tf32}"


@cache
def _processor() -> str:
    """The processor's name and its instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    named = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return combine(sorted(named))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


@cache
def _own_code() -> str:
    """Hash of the server's own source: a change of ours is checked like a change of anybody's."""
    root = Path(serve.__file__).parent
    files = sorted(path for part in ("engine", "models") for path in (root / part).rglob("*.py"))
    return combine(f"{path.relative_to(root)}={hash_file(path)}" for path in files)
