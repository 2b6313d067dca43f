"""Models without their bodies: an output head over hidden rows that were computed before.

`heads` are those that a recording brings: their rows come with each request. The head of a resident model is written
where a recording or the cache needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from serve.config import EngineConfig, ModelSpec
from serve.engine.head import Head
from serve.engine.pair import ScoreWindow
from serve.engine.runner import Segment
from serve.engine.runtime import HeadRuntime, ModelRuntime
from serve.errors import BadRequest, LoadFailed, Mismatch
from serve.models.body import body_of
from serve.models.headfile import Norm, digest_of, fitted_norm, read_head, write_head
from serve.models.load import LoadedModel, found_device
from serve.models.quiet import quiet
from serve.models.scheme import dtype_name

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class GivenRows:
    """Hidden rows that came with a job, [positions of all its windows, size]: see `serve.engine.pair.KnownRows`."""

    def __init__(self, windows: Sequence[ScoreWindow], rows: torch.Tensor) -> None:
        counts = [len(window.positions) for window in windows]
        self._starts = [sum(counts[:n]) for n in range(len(counts))]
        self._rows = rows

    def find(self, windows: Sequence[ScoreWindow], first: int) -> torch.Tensor:
        """The rows of a batch."""
        low = self._starts[first]
        return self._rows[low : low + sum(len(window.positions) for window in windows)]

    def keep(self, windows: Sequence[ScoreWindow], rows: torch.Tensor) -> None:
        """Nothing is computed."""


class HeadModel(HeadRuntime):
    """A head from a file, under a name of its own. Its hidden rows come with the request."""

    def __init__(self, name: str, path: Path, config: EngineConfig) -> None:
        """Raises LoadFailed where the file is not one of a head."""
        device = found_device(config.device)
        with quiet():
            model = read_head(path, device=device)
        weight = model.linear.weight
        super().__init__(_head_alone(name, model, int(weight.shape[0])), Head(model), config)

    def runs(self) -> ModelRuntime:
        """Raises BadRequest: there is no body."""
        raise BadRequest(f"{self.name} is an output head without a body: send its hidden rows", param="reference")


def given_rows(model: HeadRuntime, windows: Sequence[ScoreWindow], dtype: str, rows: Any) -> GivenRows:
    """The rows of a request, as they lie in its body: bytes [positions, width] uint8 of `dtype`.

    Raises BadRequest for another dtype, count or width than the windows and the head have; Mismatch for rows that the
    head cannot multiply.
    """
    if dtype not in DTYPES:
        raise BadRequest(f"hidden rows cannot be {dtype}: use one of {', '.join(DTYPES)}", param="dtype")
    kind = DTYPES[dtype]
    positions = sum(len(window.positions) for window in windows)
    size = int(model.loaded.model.get_output_embeddings().weight.shape[1])
    width = size * torch.finfo(kind).bits // 8
    if rows.shape[0] != positions:
        raise BadRequest(f"{rows.shape[0]} hidden rows came for {positions} positions", param="hidden")
    if rows.shape[1] != width:
        raise Mismatch(f"hidden rows of {rows.shape[1]} bytes came for a head of {size} x {dtype}", param="hidden")
    return GivenRows(windows, torch.from_numpy(rows.copy()).view(kind))


def head_written(model: ModelRuntime, folder: Path) -> tuple[Path, str]:
    """The file of a resident model's head in `folder`, named by its SHA-256, written where it is not there yet.

    Raises LoadFailed where the head is the model's own code, which no file holds, or the disk refuses.
    """
    if not isinstance(model.head, Head):
        raise LoadFailed(
            f"the output head of {model.name} is not a plain linear layer in float32 (it is quantized, or --logits "
            "model asks for its own code), so that hidden states alone cannot be turned into its logits"
        )
    linear, config = model.loaded.model.get_output_embeddings(), model.loaded.model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    scratch = folder / f".evalgate.{model.loaded.weights_hash}.tmp"
    bias = None if linear.bias is None else linear.bias.detach()
    try:
        write_head(
            scratch,
            linear.weight.detach() if model.streamed is None else model.streamed.whole_head(),
            bias,
            scale=scale,
            softcap=float(cap) if cap else None,
            norm=_last_norm(model),
        )
        digest = digest_of(scratch)
        path = folder / f"{digest}.safetensors"
        scratch.replace(path)
    except OSError as error:
        raise LoadFailed(f"cannot write the output head to {folder}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
    return path, digest


def _last_norm(model: ModelRuntime) -> Norm | None:
    """The norm that gives the body's last hidden states, found by watching a forward; None where none is recognised."""
    if model.runner.needs_pages:  # its pages hold the prefixes of others
        return None
    seen: list[tuple[Any, torch.Tensor]] = []

    def watch(module: Any, _: Any, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            seen.append((module, out.detach().reshape(-1, out.shape[-1])[:1].clone()))

    body = body_of(model.loaded.model)
    modules = [module for module in body.modules() if module is not body]
    hooks = [module.register_forward_hook(watch) for module in modules]
    try:
        with quiet(), torch.inference_mode():
            row = model.runner.forward([0], [Segment(0, 1)])
    finally:
        for hook in hooks:
            hook.remove()
    for module, out in seen:  # the first: dropout and the like hand the norm's rows on
        if out.shape == row.shape and torch.equal(out, row):
            with torch.inference_mode():
                return fitted_norm(module, int(row.shape[1]), dtype=row.dtype, device=row.device)
    return None


def _head_alone(name: str, model: Any, vocabulary: int) -> LoadedModel:
    dtype = dtype_name(model.linear.weight.dtype)
    return LoadedModel(
        spec=ModelSpec(name),
        name=name,
        model=model,
        tokenizer=None,
        vocab_size=vocabulary,
        context_length=1 << 30,
        weights_hash="",
        tokenizer_hash="",
        vocabulary_hash="",
        dtype=dtype,
        compute_dtype=dtype,
        load_mode="output head",
        scheme="",
    )
