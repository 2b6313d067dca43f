"""What in a model depends on the length of a whole forward, and how to hold it still.

LongRoPE takes one of two sets of rotary frequencies, and dynamic NTK scaling computes new ones, by the largest
position in the forward. Side by side with a longer sequence, in chunks, or over cached keys and values, a sequence
would get the frequencies of another length than its own. So lengths fall into regimes: two lengths are in one regime
where the rotary modules give the same angles. Only sequences of one regime share a forward, and during it every rotary
module is told the length of the whole sequence.

Nothing here knows which module does what: the modules are asked, on a copy, with the positions 0, 1 and n - 1.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from serve.models.body import body_of
from serve.models.load import LoadedModel

_NAMED = re.compile(r"position|length|window|context|chunk|seq")


class Lengths:
    """The regimes of one model. Regime 0 is that of short sequences, and of all where nothing depends on the length."""

    def __init__(self, loaded: LoadedModel) -> None:
        modules = list(rotary_modules(loaded.model))
        probed = [copy.deepcopy(module).to("cpu", torch.float32) for module in modules]
        lengths = _worth_probing(loaded)
        self.held_at: int | None = None  # tokens of the sequence whose parts run
        self._probes: list[torch.nn.Module] = []
        for module, probe in zip(modules, probed, strict=True):
            if len({_angles(probe, n) for n in lengths}) > 1:
                self._probes.append(probe)
                module.register_forward_pre_hook(self._add_last_position, with_kwargs=True)
                module.register_forward_hook(self._drop_last_position)
        self._regimes: dict[tuple[bytes, ...], int] = {}
        self._known: dict[int, int] = {}
        self.regime(1)  # the first one asked for is number 0

    @property
    def none(self) -> bool:
        """Whether nothing in the model depends on the length."""
        return not self._probes

    def regime(self, n: int) -> int:
        """The number of the regime of sequences of n tokens."""
        if not self._probes:
            return 0
        if n not in self._known:
            angles = tuple(_angles(probe, n) for probe in self._probes)
            self._known[n] = self._regimes.setdefault(angles, len(self._regimes))
        return self._known[n]

    @contextmanager
    def held(self, n: int) -> Iterator[None]:
        """Run forwards as parts of a sequence of n tokens, whatever positions they have."""
        self.held_at = n
        try:
            yield
        finally:
            self.held_at = None

    def _add_last_position(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.held_at is None:
            return None
        forget(module)
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        positions = bound.arguments["position_ids"]
        last = positions.new_full((*positions.shape[:-1], 1), self.held_at - 1)
        bound.arguments["position_ids"] = torch.cat([positions, last], dim=-1)
        return bound.args, bound.kwargs

    def _drop_last_position(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.held_at is None:
            return None
        return tuple(part[..., :-1, :] for part in output) if isinstance(output, tuple) else output[..., :-1, :]


def rotary_modules(model: Any) -> Iterator[torch.nn.Module]:
    """Modules that turn positions into rotary angles, as transformers writes them."""
    for module in body_of(model).modules():
        if "rotary" in type(module).__name__.lower() and "position_ids" in inspect.signature(module.forward).parameters:
            yield module


def forget(module: torch.nn.Module) -> None:
    """Put a dynamic NTK module back to its first frequencies.

    transformers keeps those of the longest sequence seen so far for every later one that is longer than the original
    context, so that a model's answer would depend on what it was asked before.
    """
    kinds = getattr(module, "rope_type", None)
    for prefix, kind in [("", kinds)] if isinstance(kinds, str) else [(f"{t}_", k) for t, k in (kinds or {}).items()]:
        original = getattr(module, f"{prefix}original_inv_freq", None)
        if "dynamic" in kind and original is not None:
            current = getattr(module, f"{prefix}inv_freq")
            module.register_buffer(f"{prefix}inv_freq", original.clone().to(current.device), persistent=False)
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def named_lengths(config: Any) -> list[int]:
    """Every length that a configuration names, ascending: contexts, original contexts, windows, chunks."""
    found: set[int] = set()

    def walk(values: dict[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                walk(value)
            elif type(value) is int and value > 1 and _NAMED.search(key):
                found.add(value)

    walk(config.get_text_config().to_dict())
    return sorted(found)


def _worth_probing(loaded: LoadedModel) -> list[int]:
    """Both sides of every named length, and powers of two, within the context."""
    named = [n + side for n in named_lengths(loaded.model.config) for side in (-1, 0, 1)]
    doubled = [1 << i for i in range(loaded.context_length.bit_length())]
    return sorted({n for n in (*named, *doubled, loaded.context_length) if 1 <= n <= loaded.context_length})


def _angles(module: torch.nn.Module, n: int) -> bytes:
    """What a rotary module gives at the positions 0 and 1 of a sequence of n tokens; b"" for one of another kind.

    The sines at position 1 are those of the frequencies themselves, and the cosines at 0 are the scaling.
    """
    positions = torch.tensor([[0, min(1, n - 1), n - 1]])
    kinds = getattr(module, "rope_type", None)
    parts = []
    try:
        for options in [{"layer_type": kind} for kind in kinds] if isinstance(kinds, dict) else [{}]:
            forget(module)
            output = module(torch.zeros(1), position_ids=positions, **options)
            parts += [part[..., :2, :].contiguous() for part in (output if isinstance(output, tuple) else (output,))]
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError):
        return b""
    if n == 1:  # position 1 is not there
        return _angles(module, 2)
    return b"".join(torch.view_as_real(p).numpy().tobytes() if p.is_complex() else p.numpy().tobytes() for p in parts)
